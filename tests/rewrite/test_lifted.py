"""Lifted transforms become NNX's, around the same layers."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite.prove._weights import random_inputs, random_variables
from tests.rewrite import models_lifted as models
from tests.rewrite.test_programs import imported, spec
from tests.rewrite.weights import without_weights

SIZE = 4


@functools.cache
def rewritten():
    return bridge.rewrite(models.Transformed, spec(2, SIZE), gradients=False)


@functools.cache
def pair(remat):
    """The Linen model with weights, and the new one with the same."""
    linen = models.Transformed(remat=remat)
    x = random_inputs(spec(2, SIZE))
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(1), x))
    (module,) = imported(rewritten())
    make = functools.partial(module.Transformed, remat, **rewritten().sizes[0])
    model = without_weights(lambda: make(rngs=nnx.Rngs(2)))
    port.plan(variables, model, rewritten().rules).apply()
    return linen, variables, model, x


def test_every_class_is_rewritten_and_proven():
    result = rewritten()
    assert result.is_proven, str(result)
    levels = {each.name: each.level for each in result.classes}
    # The cell's call is that of one step, so it cannot be called apart with other fields.
    assert levels.pop("Cell") == "proven for this configuration", str(result)
    assert list(levels.values()) == ["proven"] * 11, str(result)
    (text,) = result.sources.values()
    assert "_linen" not in text
    assert "bridge" not in text.split("\n\n", 1)[1]


def test_outputs_are_equal_without_any_help_of_the_rewriter():
    linen, variables, model, x = pair(True)
    expected = jax.jit(linen.apply)(variables, x)
    found = nnx.jit(lambda m, x: m(x))(model, x)
    # A loop is compiled as one program, in which XLA may add in another order.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.parametrize("remat", [True, False])
def test_both_programs_have_the_same_transforms(remat):
    """What remat saves and what scan does not unroll is seen in the program alone."""
    linen, variables, model, x = pair(remat)
    graphdef, state = nnx.split(model)
    new = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, x)
    old = jax.make_jaxpr(linen.apply)(variables, x)
    for primitive in ("remat2", "checkpoint", "scan"):
        counted = [len(re.findall(rf"\b{primitive}\[", str(each))) for each in (new, old)]
        assert counted[0] == counted[1], primitive
    assert ("checkpoint[" in str(new)) or ("remat2[" in str(new))


def test_stacked_parameters_stay_stacked_and_named():
    with jax.sharding.set_mesh(jax.make_mesh((1,), ("layers",))):
        (module,) = imported(rewritten())
        model = module.Scanned(in_features=SIZE, rngs=nnx.Rngs(0))
    assert model.layers.dense_0.kernel.shape[0] == 3
    assert model.layers.dense_1.bias.shape == (3, SIZE)


def test_members_of_an_ensemble_and_layers_of_a_scan_start_apart():
    _, _, model, _ = pair(True)
    (module,) = imported(rewritten())
    made = module.Ensemble(in_features=3, action_features=3, rngs=nnx.Rngs(0))
    kernel = made.critic.dense_0.kernel
    assert jnp.abs(kernel[0] - kernel[1]).max() > 0
    assert model.scanned.layers.dense_0.kernel.shape[0] == 3


def test_a_transform_that_a_flag_chooses_is_around_all_its_layers():
    """No run has both flags: one is flipped at a time."""
    x = spec(2, SIZE)
    result = bridge.rewrite(models.Chosen, x, gradients=False)
    assert [each.level for each in result.classes] == ["proven"] * 4, str(result)
    (module,) = imported(result)
    for remat in (True, False):
        found = _remats(models.Chosen(remat, True), module.Chosen, result, x)
        assert [len(each) for each in found] == [5 * remat] * 2


@pytest.mark.parametrize("given", [{}, {"remat": True, "scan": True}])
def test_two_flags_decide_about_a_transform_and_its_options(given):
    """Flags are flipped one at a time: from some values no such run has all transforms."""
    x = spec(2, SIZE)
    make = functools.partial(models.ScannedOrNot, **given)
    result = bridge.rewrite(make, x, gradients=False)
    assert [each.level for each in result.classes] == ["proven"] * 2, str(result)
    # Linen's scan and NNX's carry other values, and are one program all the same.
    assert "entry" in result.programs
    (module,) = imported(result)
    for flags in itertools.product((False, True), repeat=2):
        linen, new = _remats(models.ScannedOrNot(*flags), module.ScannedOrNot, result, x)
        assert linen == new
        remat, scan = flags
        assert linen == sorted([f"{not scan}"] * remat * (1 if scan else 2) + [f"{remat}"])


def _remats(linen, cls, result, x):
    """`prevent_cse` of each `remat` in the Linen module and in the new one of the same fields."""
    fields = {f.name: getattr(linen, f.name) for f in dataclasses.fields(linen)}
    own = {name: value for name, value in fields.items() if name not in ("parent", "name")}
    make = functools.partial(cls, **own, **result.sizes[0])

    def run(x):
        return make(rngs=nnx.Rngs(0))(x)

    programs = (
        jax.make_jaxpr(functools.partial(linen.init_with_output, jax.random.key(0)))(x),
        jax.make_jaxpr(run)(x),
    )
    return [sorted(re.findall(r"prevent_cse=(\w+)", str(each))) for each in programs]
