"""A GraphDef that is kept without the objects of the model that it came from."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
from bridge._graphdefs.static_graphdef import split
from bridge._graphdefs.template import Template


class Config:
    """Belongs to whoever makes a model of it."""

    def __init__(self, rate):
        self.rate = rate


class Model(nnx.Module):
    def __init__(self, held):
        self.linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.held = nnx.static(held)


def shared(x):
    return x


def graphdef_of(held):
    return split(Model(held))[0]


def held_in(graphdef):
    return nnx.merge(graphdef, nnx.state(Model(None))).held


def filled(held, own, other):
    """What a kept GraphDef of `held` has in the place of `own` for another model's object."""
    template = Template.of(graphdef_of(held), [own])
    return held_in(template.fill([other], None))


@pytest.mark.parametrize("held", [None, 3, "text", 2.5, (1, (2,)), len, shared, nnx.relu, Config])
def test_what_belongs_to_nobody_is_kept(held):
    graphdef = graphdef_of(held)
    kept = Template.of(graphdef, []).fill([], None)
    assert kept == graphdef
    assert held_in(kept) is held or held_in(kept) == held


@pytest.mark.parametrize(
    "put",
    [
        lambda config: config,
        lambda config: (1, config),
        lambda config: [config],
        lambda config: {"a": (config, 2)},
        lambda config: {config: 1},
        lambda config: functools.partial(shared, config),
        lambda config: functools.partial(shared, x=config),
    ],
    ids=["itself", "tuple", "list", "dict", "key", "partial", "keyword"],
)
def test_an_object_of_a_model_is_replaced_by_the_one_of_whoever_asks(put):
    mine, yours = Config(1), Config(2)
    found, expected = filled(put(mine), mine, yours), put(yours)
    if isinstance(expected, functools.partial):
        assert found.func is expected.func
        assert (found.args, found.keywords) == (expected.args, expected.keywords)
    else:
        assert found == expected


class Counting(nnx.Module):
    def __init__(self):
        self.calls = []
        self.items = nnx.data({"seen": {0}})

    def __call__(self, x):
        self.calls.append(1)
        self.items["seen"].add(len(self.items["seen"]))
        return x * len(self.calls) * len(self.items["seen"])


def test_what_a_call_writes_into_is_not_that_of_the_next_call():
    module = bridge.to_linen(Counting)
    for _ in range(2):
        y, _ = module.apply({}, jnp.ones(1), mutable=True)
        assert y == Counting()(jnp.ones(1)) == 2


def test_the_graphdef_itself_is_not_kept_with_a_hole_in_it():
    mine = Config(1)
    graphdef = graphdef_of(mine)
    template = Template.of(graphdef, [mine])
    assert held_in(graphdef) is mine
    assert held_in(template.fill([mine], None)) is mine


def closure(config):
    return lambda x: config.rate * x


@pytest.mark.parametrize(
    "make",
    [lambda config: config, lambda config: {config: 1}, closure, lambda config: lambda x=config: x],
    ids=["unknown", "key", "closure", "default"],
)
def test_an_object_that_nobody_has_given_is_not_kept(make):
    assert Template.of(graphdef_of(make(Config(1))), []) is None


def test_a_closure_over_an_object_of_a_model_is_not_kept():
    mine = Config(1)
    assert Template.of(graphdef_of(closure(mine)), [mine]) is None
