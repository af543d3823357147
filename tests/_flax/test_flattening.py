"""Flattening tells what `nnx.split` tells, and a builder makes what `nnx.merge` makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._flax.flattening import GraphDefBuilder, flatten
from tests.strategies import exact


class Nested(nnx.Module):
    """Lists, dicts, shared parts, bare arrays, and itself."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.layers = nnx.List([nnx.relu, self.linear, nnx.Dropout(0.5, rngs=rngs)])
        self.named = nnx.data({"a": nnx.Param(jnp.ones(1)), "b": [1, nnx.Cache(jnp.ones(2)), "c"]})
        self.alias = self.linear.kernel
        self.array = nnx.data(jnp.arange(3.0))
        self.itself = nnx.data([self])


class Plain(nnx.Object):
    """An object that is no pytree."""

    def __init__(self, *, rngs):
        self.param = nnx.Param(rngs.params.uniform((2,)))
        self.label = "label"


class WithReference(nnx.Module):
    """A Variable whose value is a reference, under two names."""

    def __init__(self, *, rngs):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32), ref=True)
        self.again = self.count


def wrapped(*, rngs):
    return bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=rngs).lazy_init(
        jnp.ones((1, 2))
    )


MODELS = [Nested, Plain, WithReference, wrapped, nnx.MultiHeadAttention]


def made(model):
    options = {"num_heads": 2, "in_features": 4} if model is nnx.MultiHeadAttention else {}
    return model(rngs=nnx.Rngs(0, dropout=1), **options)


def values(leaves):
    return [leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for leaf in leaves]


@pytest.mark.parametrize("model", MODELS)
def test_it_makes_what_nnx_merge_makes(model):
    graphdef, state = nnx.split(made(model), graph=True)
    merged = nnx.merge(graphdef, state, copy=True)
    built = GraphDefBuilder(graphdef).build(values(flatten(made(model))[1])).module
    assert nnx.graphdef(built, graph=True) == nnx.graphdef(merged, graph=True) == graphdef
    assert exact(nnx.to_pure_dict(nnx.state(built, graph=True))) == exact(
        nnx.to_pure_dict(nnx.state(merged, graph=True))
    )
    assert sorted(vars(built)) == sorted(vars(merged))


def test_every_build_is_a_module_of_its_own():
    graphdef, leaves = flatten(made(Nested))
    blueprint = GraphDefBuilder(graphdef)
    first, second = (blueprint.build(values(leaves)).module for _ in range(2))
    first.linear.kernel[...] = jnp.zeros((2, 2))
    first.named["b"].append("d")
    first.label = "first"
    assert len(second.named["b"]) == 3
    assert not hasattr(second, "label")
    np.testing.assert_array_equal(second.linear.kernel[...], made(Nested).linear.kernel[...])
    assert first.alias is first.linear.kernel
    assert first.itself[0] is first


def test_a_variable_that_is_given_is_put_in_as_it_is():
    graphdef, leaves = flatten(made(Nested))
    built = GraphDefBuilder(graphdef).build(leaves)
    assert any(built.module.linear.kernel is leaf for leaf in leaves)


def test_it_tells_the_objects_and_the_variable_of_each_leaf():
    graphdef, leaves = flatten(made(Nested))
    built = GraphDefBuilder(graphdef).build(values(leaves))
    found = [node for _, node in nnx.iter_graph(built.module, graph=True)]
    objects = {id(node) for node in found if isinstance(node, nnx.Pytree)}
    assert {id(node) for node in built.objects} == objects
    variables = {id(node) for node in found if isinstance(node, nnx.Variable)}
    assert {id(v) for v in built.variables if v is not None} == variables
    for leaf, variable in zip(leaves, built.variables, strict=True):
        assert type(variable) is (type(leaf) if isinstance(leaf, nnx.Variable) else type(None))
        assert variable is None or variable.get_raw_value() is leaf.get_raw_value()


def test_a_module_made_inside_a_trace_belongs_to_it():
    graphdef, leaves = flatten(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))

    def updated(values, x):
        module = GraphDefBuilder(graphdef).build(values).module
        module(x)
        return module.mean[...]

    x = jnp.arange(6.0).reshape(2, 3)
    native = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    nnx.jit(lambda module, x: module(x))(native, x)
    np.testing.assert_array_equal(jax.jit(updated)(values(leaves), x), native.mean[...])


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
