"""Generated classes with attributes of every kind and name do what they do in Linen."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as peer
from flax.traverse_util import flatten_dict
from hypothesis import event, given

import bridge
from tests._linen_style_module.generated_attributes import X, blocks, model
from tests.drawing import drawing

pytestmark = pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")

KEY = jax.random.key(0)


def shapes(variables):
    return jax.tree.map(np.shape, variables)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


@drawing(30)
@given(blocks())
def test_variables_and_outputs_are_linens(block):
    linen, ours = model(block, nn), model(block, bridge)
    variables = linen.init(KEY, X)
    own = ours.init(0, X)
    assert shapes(own) == shapes(variables)
    expected = linen.apply(variables, X, mutable=["stats"])
    assert_same(ours.apply(variables, X, mutable=["stats"]), expected)
    captured = linen.apply(variables, X, mutable=["stats"], capture_intermediates=True)
    found = ours.apply(variables, X, mutable=["stats"], capture_intermediates=True)
    assert_same(found, captured)


@drawing(25)
@given(blocks())
def test_a_module_that_keeps_its_variables_is_linens(block):
    linen = model(block, nn)
    variables = linen.init(KEY, X)
    kept = model(block, bridge).bind(variables)
    for step in range(3):
        y, updates = linen.apply(variables, X, mutable=["stats"])
        assert np.array_equal(kept(X), y)
        variables = {**variables, **updates}
        assert_same(kept.variables.unfreeze(), variables)
        # What every NNX program does with a model.
        copies = nnx.clone, lambda m: nnx.merge(*nnx.split(m)), lambda m: jax.tree.map(np.array, m)
        kept = copies[step](kept)
    fresh = model(block, bridge)
    fresh.bridge__rngs = nnx.Rngs(0)
    bridge.lazy_init(fresh, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert_same(fresh.variables.unfreeze(), model(block, bridge).init(nnx.Rngs(0), X))


@drawing(25)
@given(blocks(depth=1))
def test_values_are_the_peers_where_it_knows_the_class(block):
    try:
        expected_y, expected = model(block, peer).init_with_output(0, X)
    except Exception as error:
        event(f"the peer: {type(error).__name__}")
        return
    y, variables = model(block, bridge).init_with_output(0, X)
    linen = model(block, nn).init(KEY, X)
    if {p: np.shape(x) for p, x in flatten_dict(expected).items()} != shapes(flatten_dict(linen)):
        event("the peer has other paths")
        return
    event("the same paths")
    assert_same(variables, expected)
    assert np.array_equal(y, expected_y)
