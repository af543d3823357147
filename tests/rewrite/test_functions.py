"""Lifted transforms of functions become NNX's, with the functions as they were."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite.prove._weights import random_inputs, random_variables
from tests.rewrite import models_functions as models
from tests.rewrite.test_programs import imported, spec
from tests.rewrite.weights import without_weights

SIZE = 4


@functools.cache
def rewritten():
    return bridge.rewrite(models.Functions, spec(2, SIZE), gradients=False, fast=True)


@functools.cache
def module():
    (found,) = imported(rewritten())
    return found


def test_every_class_is_rewritten_and_proven_without_an_operation_of_linen():
    result = rewritten()
    assert result.is_proven, str(result)
    assert {c.level for c in result.classes} <= {"proven", "proven for this configuration"}
    (text,) = result.sources.values()
    assert "nn.Module" in text.replace("nnx.", "nn.")
    assert not [line for line in text.splitlines() if " nn." in line or "_linen" in line]


def applied(variables, x):
    return models.Functions().apply(variables, x, mutable=["batch_stats"])[0]


def test_outputs_are_equal_without_any_help_of_the_rewriter():
    x = random_inputs(spec(2, SIZE))
    variables = random_variables(jax.eval_shape(models.Functions().init, jax.random.key(1), x))
    make = module().Functions
    model = without_weights(lambda: make(in_features=SIZE, rngs=nnx.Rngs(2)))
    port.plan(variables, model, rewritten().rules).apply()
    found = nnx.jit(lambda m, x: m(x))(model, x)[0]
    expected = jax.jit(applied)(variables, x)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_leaves_keep_their_shapes_and_specs():
    make = functools.partial(module().OtherAxes, in_features=SIZE)
    model = without_weights(lambda: make(rngs=nnx.Rngs(0)))
    assert model.scanned.kernel.shape == (SIZE, 3, SIZE)
    assert model.scanned.kernel.out_sharding == ("embed", "stage", "mlp")
    assert model.scanned.bias.shape == (SIZE, 3)
    assert model.mapped.kernel.shape == (SIZE, SIZE, 2)
    other = without_weights(lambda: make(axis=0, rngs=nnx.Rngs(0)))
    assert other.scanned.kernel.out_sharding == ("stage", "embed", "mlp")
    assert other.shifted.dense.bias.shape == (2, SIZE)


def test_layers_start_apart_and_draw_apart_where_linen_splits_the_keys():
    with nnx.use_eager_sharding(False):
        model = module().ScannedLayer(in_features=SIZE, rngs=nnx.Rngs(0))
    kernels = model.blocks.dense_0.kernel[...]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0
    assert len(set(map(str, jax.random.key_data(model.blocks.dropout.rngs.key[...])))) == 3


def test_layers_start_alike_and_draw_alike_where_linen_does_not():
    result = bridge.rewrite(models.Alike, spec(2, SIZE), gradients=False, fast=True)
    assert result.is_proven, str(result)
    (own,) = imported(result)
    model = own.Alike(in_features=SIZE, rngs=nnx.Rngs(0))
    kernels = model.block.dense_0.kernel[...]
    assert jnp.abs(kernels[0] - kernels[1]).max() == 0
    assert len(set(map(str, jax.random.key_data(model.block.dropout.rngs.key[...])))) == 1


def test_one_cell_draws_another_mask_at_each_step():
    model = module().OverTime(in_features=SIZE, rngs=nnx.Rngs(0))
    y = model(jnp.ones((1, 40, SIZE)), True)
    dropped = np.asarray(y[0] == 0)
    assert 0 < dropped.all(-1).sum() < 40
    assert len(set(map(str, dropped))) > 2


def test_the_transforms_are_there():
    """What is rematerialised is seen in the program alone."""
    make = module().Functions
    model = without_weights(lambda: make(in_features=SIZE, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    x = jnp.ones((2, SIZE))
    new = str(jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, x))
    variables = jax.eval_shape(models.Functions().init, jax.random.key(0), x)
    old = str(jax.make_jaxpr(applied)(variables, x))
    for primitive in ("(remat2|checkpoint)", "scan", "while", "cond"):
        counts = [len(re.findall(rf"\b{primitive}\[", text)) for text in (new, old)]
        assert counts[0] == counts[1] > 0, primitive
