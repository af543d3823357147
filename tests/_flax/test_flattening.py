"""Flattening tells what `nnx.split` tells, leaves in order, and leaves the module as it was."""

import jax.numpy as jnp
import pytest
from flax import nnx

from bridge._flax.flattening import flatten

from .test_graphdef_builder import MODELS, made, values


@pytest.mark.parametrize("model", MODELS)
def test_flattening_tells_what_nnx_split_tells(model):
    module = made(model)
    graphdef, leaves = flatten(module)
    split, state = nnx.split(module, graph=True)
    assert graphdef == split
    expected = [leaf for _, leaf in nnx.to_flat_state(state)]
    assert [type(leaf) for leaf in leaves] == [type(leaf) for leaf in expected]
    for value, other in zip(values(leaves), values(expected), strict=True):
        assert value is other


def test_variables_that_share_a_reference_share_it_afterwards():
    module = nnx.Module()
    module.a = nnx.Variable(jnp.zeros(()), ref=True)
    module.b = nnx.Param(jnp.ones(()), ref=True)
    module.b.set_raw_value(module.a.get_raw_value())
    flatten(module)
    assert module.b.get_raw_value() is module.a.get_raw_value()
    module.a[...] = 5.0
    assert float(module.b[...]) == 5
