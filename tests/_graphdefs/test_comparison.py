"""Two GraphDefs that are equal to Flax, and whether every program sees the same in them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge._graphdefs.comparison import hold_the_same, is_equal, static_attributes


class Model(nnx.Module):
    def __init__(self, static):
        self.weight = nnx.Param(jnp.ones(2), note="a")
        self.static = nnx.static(static)


def graphdef(static):
    return nnx.graphdef(Model(static))


class Equal:
    """Equal to every other one, whatever it holds."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


def add(x, y):
    return x + y


@pytest.mark.parametrize(
    "static",
    [3, "a", (1, ("b", None)), np.float32, add, Equal(1), functools.partial],
)
def test_a_definition_made_twice_is_the_same(static):
    a, b = graphdef(static), graphdef(static)
    assert is_equal(a, b)
    assert hold_the_same(a, b)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1, 2.0)), (Equal(1), Equal(2))],
)
def test_what_python_calls_equal_may_differ_to_a_program(one, other):
    a, b = graphdef(one), graphdef(other)
    assert a == b
    assert is_equal(a, b)
    assert not hold_the_same(a, b)
    assert not hold_the_same(b, a)


@pytest.mark.parametrize("other", [graphdef(4), nnx.graphdef(nnx.Dict(static=1))])
def test_what_flax_tells_apart_is_apart(other):
    assert graphdef(3) != other
    assert not is_equal(graphdef(3), other)


def test_objects_count_as_other_ones_only_where_identities_do():
    a, b = graphdef(Equal([1])), graphdef(Equal([1]))
    assert hold_the_same(a, b)
    assert not hold_the_same(a, b, identities=True)
    assert hold_the_same(a, a, identities=True)


def test_static_attributes_are_those_that_hold_no_leaf():
    assert 3 in static_attributes(graphdef(3))
    assert not any(isinstance(x, nnx.Variable) for x in static_attributes(graphdef(3)))
