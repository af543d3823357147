"""Two GraphDefs are equal if every program sees the same in them, whatever Flax says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge._graphdefs.static_graphdef import StaticGraphDef

LOOKED_UP = 1


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


def is_equal(a, b):
    return StaticGraphDef(a) == b


def look(graphdef):
    return StaticGraphDef(graphdef).look


def is_same(a, b):
    return look(a).fingerprint.key == look(b).fingerprint.key


@pytest.mark.parametrize(
    "static",
    [3, "a", (1, ("b", None)), np.float32, add, Equal(1), functools.partial],
)
def test_a_definition_made_twice_is_the_same(static):
    a, b = graphdef(static), graphdef(static)
    assert is_equal(a, b)
    assert is_same(a, b)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1, 2.0)), (Equal(1), Equal(2))],
)
def test_what_python_calls_equal_may_differ_to_a_program(one, other):
    a, b = graphdef(one), graphdef(other)
    assert a == b
    assert is_equal(a, b)
    assert not is_same(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x * 2,
        lambda: functools.partial(add, y=2),
        lambda: Equal([1]),
        lambda: Equal([jnp.arange(3), np.arange(3), jax.random.key(1)]),
        lambda: {"a": [1, {2}]},
        lambda: type("Made", (), {"__qualname__": "f.<locals>.Made"}),
    ],
)
def test_what_python_calls_different_may_be_the_same_to_every_program(make):
    a, b = graphdef(make()), graphdef(make())
    assert is_same(a, b)


def test_a_function_is_told_by_what_it_holds_and_not_by_globals(monkeypatch):
    def made(held):
        return lambda x: x * held + LOOKED_UP

    one = look(graphdef(made(1))).fingerprint
    monkeypatch.setitem(globals(), "LOOKED_UP", 2)
    assert look(graphdef(made(1))).fingerprint == one
    assert look(graphdef(made(2))).fingerprint != one


def test_objects_that_nobody_can_look_into_are_told_beside_the_key():
    a, b = (look(graphdef(jax.jit(lambda x: x))).fingerprint for _ in range(2))
    assert a.key == b.key
    assert a.identities != b.identities


@pytest.mark.parametrize("other", [graphdef(4), nnx.graphdef(nnx.Dict(static=1))])
def test_what_flax_tells_apart_is_apart(other):
    assert graphdef(3) != other
    assert not is_equal(graphdef(3), other)
    assert not is_same(graphdef(3), other)


def test_objects_are_other_ones_though_they_hold_the_same():
    a, b = look(graphdef(Equal([1]))), look(graphdef(Equal([1])))
    assert a.fingerprint == b.fingerprint
    assert not {id(x) for x in a.objects if type(x) is Equal} & {id(x) for x in b.objects}
