"""Models that decode are rewritten with their caches, and compared step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite._rewriter import Rewriter
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.prove._weights import random_variables
from tests.rewrite import models_decoding as models
from tests.rewrite.test_programs import imported, tokens

INPUT = tokens(2, 5)
make = functools.partial(models.Decoder, depth=2, decode=True)


@functools.cache
def rewritten():
    return bridge.rewrite(make, INPUT, gradients=False, fast=True)


def test_every_class_is_proven_in_steps_and_on_whole_sequences():
    result = rewritten()
    assert result.is_proven, str(result)
    assert {c.level for c in result.classes} <= {"proven", "proven for this configuration"}
    steps = {f"entry, step {number} of decoding" for number in (1, 2, 3)}
    assert steps | {"with decode=False"} == set(result.reports)
    (text,) = result.sources.values()
    assert text.count("init_cache(cache_shape)") == 2
    assert "bridge" not in text


def test_whole_sequences_are_decoded_alike_without_the_rewriter():
    result = rewritten()
    (module,) = imported(result)
    linen = make()
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(0), INPUT))
    model = module.Decoder(decode=True, **result.sizes[0], rngs=nnx.Rngs(0))
    port.plan(variables, model, result.rules).apply()
    given = jax.random.randint(jax.random.key(1), INPUT.shape, 0, 7)
    for number in range(given.shape[1]):
        token = given[:, number : number + 1]
        expected, cache = linen.apply(variables, token, mutable=["cache"])
        variables = {**variables, **cache}
        np.testing.assert_allclose(model(token), expected, rtol=1e-5, atol=1e-5)
    assert model.positions.index[...] == variables["cache"]["Positions_0"]["index"] == 5
    assert jnp.abs(model.own_cache.keys[...]).min() > 0


def test_a_cache_is_as_long_as_its_caller_says():
    # Twice 4: the width, and the length of the sample.
    make = functools.partial(models.Layers, decode=True)
    result = bridge.rewrite(make, tokens(2, 4), gradients=False, fast=True)
    (module,) = imported(result)
    assert result.sizes[0] == {"cache_shape": (2, 4, 4)}
    model = module.Layers(decode=True, cache_shape=(3, 6, 4), rngs=nnx.Rngs(0))
    linen = jax.eval_shape(make().init, jax.random.key(0), tokens(3, 6))["cache"]
    assert sorted(x.shape for x in jax.tree.leaves(nnx.state(model, nnx.Cache))) == sorted(
        x.shape for x in jax.tree.leaves(linen)
    )


def test_a_training_model_needs_no_cache():
    (module,) = imported(rewritten())
    model = nnx.eval_shape(lambda: module.Decoder(rngs=nnx.Rngs(0)))
    assert not jax.tree.leaves(nnx.state(model, nnx.Cache))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("index[...] = i + 1\n", "index[...] = i + 2\n"),
        ("keys[...], values[...], index", "values[...], keys[...], index"),
        ("(1, 1, x.shape[-1])", "(1, 1, x.shape[-1]) ) * (1 + (i > 1)"),
    ],
    ids=["a step too far", "keys for values", "wrong in the third step"],
)
def test_a_fault_that_only_steps_show_is_found(right, wrong):
    rewriter = faulty()
    (name, (path, text)) = next(iter(rewriter.texts.items()))
    assert right in text
    before = dict(rewriter.texts)
    rewriter.texts[name] = (path, text.replace(right, wrong))
    try:
        assert rewriter._proven() is not None
    finally:
        rewriter.texts = before


@functools.cache
def faulty():
    entry = Entry(functools.partial(models.Decoder, depth=1, decode=True), (INPUT,))
    rewriter = Rewriter(
        [entry],
        keep_names=False,
        only=None,
        skip=(),
        on_progress=lambda text: None,
        gradients=False,
    )
    rewriter.trace()
    rewriter.varied.clear()
    rewriter.write()
    return rewriter


def test_a_model_of_which_no_single_step_can_be_run_needs_review():
    result = bridge.rewrite(
        models.WholeOnly, jax.ShapeDtypeStruct((2, 4, 3), "float32"), gradients=False
    )
    assert result.is_proven, str(result)
    (found,) = result.classes
    assert found.level == "needs review"
    assert "only whole inputs were compared" in found.notes[0]


def test_a_part_that_no_step_reaches_stays_linen_alone():
    make = functools.partial(models.Both, decode=True)
    x = jax.ShapeDtypeStruct((2, 3, 4), "float32")
    result = bridge.rewrite(make, x, method="write", gradients=False, fast=True)
    assert result.is_proven, str(result)
    left = {each.name for each in result.classes if each.level == "left Linen"}
    assert left == {"Reader"}, str(result)
