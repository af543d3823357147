"""Names and numbers that the traces of two models contradict."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from bridge import port
from tests.drawing import drawing
from tests.port.cases import random_values
from tests.port.models import shapes_of

X = jnp.asarray(np.random.default_rng(5).normal(size=(2, 4)), jnp.float32)


class LinenChain(nn.Module):
    """Layers by name, in the order in which they are called."""

    names: tuple[str, ...]
    depth: int = 1

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            if self.depth > 1:
                x = LinenChain(self.names, self.depth - 1, name=name)(x)
            else:
                x = nn.tanh(nn.Dense(4, name=name)(x))
        return x


class Chain(nnx.Module):
    """A list of layers, or layers under the names of Linen, called in any order."""

    def __init__(self, attribute, order, depth=1):
        def layer():
            if depth > 1:
                return Chain(attribute, order, depth - 1)
            return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        layers = [layer() for _ in order]
        if attribute.endswith("_"):
            for number, each in enumerate(layers):
                setattr(self, f"{attribute}{number}", each)
        else:
            setattr(self, attribute, nnx.List(layers))
        self.attribute, self.order, self.depth = attribute, nnx.static(order), depth

    def __call__(self, x):
        for number in self.order:
            if self.attribute.endswith("_"):
                layer = getattr(self, f"{self.attribute}{number}")
            else:
                layer = getattr(self, self.attribute)[number]
            x = layer(x) if self.depth > 1 else nnx.tanh(layer(x))
        return x


def suggested(linen, model, *inputs, variables=None):
    """The suggestions of two traced models, if they move values to the right places."""
    inputs = inputs or (X,)
    variables = variables or random_values(shapes_of(linen, *inputs))
    found = port.suggest(variables, model, *inputs, linen=linen)
    assert found.plan.ok, str(found.plan)
    found.plan.apply()
    np.testing.assert_array_equal(model(*inputs), linen.apply(variables, *inputs))
    return found


@st.composite
def chains(draw):
    count = draw(st.integers(2, 4))
    orders = [tuple(draw(st.permutations(range(count)))) for _ in range(2)]
    linen = draw(st.sampled_from(("up_", "Dense_")))
    return linen, draw(st.sampled_from(("up", "up_", "Dense_", "layers"))), *orders


@given(chains(), st.integers(1, 2))
@drawing(15)
def test_a_chain_of_calls_decides_whatever_the_numbers_say(chain, depth):
    prefix, attribute, linen_order, order = chain
    linen = LinenChain(tuple(f"{prefix}{number}" for number in linen_order), depth)
    suggested(linen, Chain(attribute, order, depth))


def test_a_match_that_calls_contradict_is_listed_first():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = LinenChain(("layer_0", "layer_1"), name="before")(x)
            return LinenChain(("up_2", "up_1", "up_0"), name="decoder")(x)

    class Native(nnx.Module):
        def __init__(self):
            self.first = Chain("layers", (0, 1))
            self.decoder = Chain("up", (0, 1, 2))

        def __call__(self, x):
            return self.decoder(self.first(x))

    variables = random_values(shapes_of(Linen(), X))
    # The plan by itself is clean, and wrong.
    wrong = Native()
    plan = port.plan(variables, wrong)
    assert plan.ok
    plan.apply()
    assert not np.allclose(wrong(X), Linen().apply(variables, X), atol=0.1)
    found = suggested(Linen(), Native(), variables=variables)
    first, *others = found.proposals
    assert (first.is_disputed, first.is_weak) == (True, False)
    assert first.rules["decoder/up_2"] == "decoder.up.0"
    assert "although names say otherwise" in first.evidence
    # The layers before, which the plan matches by number as the calls do, need no rule.
    assert not others
    assert json.loads(found.to_json())["proposals"][0]["is_disputed"]


def test_calls_that_are_no_chain_leave_equal_names_in_doubt():
    def wiring(layer, x, first):
        names = [name for name in "abcd" if name != first]
        made = layer(first, x)
        return sum(layer(name, made) for name in names)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wiring(lambda name, x: jnp.tanh(nn.Dense(4, name=name)(x)), x, "a")

    class Native(nnx.Module):
        def __init__(self, first):
            self.a, self.b, self.c, self.d = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in "abcd")
            self.first = first

        def __call__(self, x):
            return wiring(lambda name, x: jnp.tanh(getattr(self, name)(x)), x, self.first)

    variables = random_values(shapes_of(Linen(), X))
    (doubt,) = port.suggest(variables, Native("c"), X, linen=Linen()).proposals
    assert (doubt.is_disputed, doubt.is_weak) == (True, True)
    assert doubt.rules == {name: name for name in "abcd"}
    assert not port.suggest(variables, Native("a"), X, linen=Linen()).proposals


def test_shapes_decide_where_equal_names_do_not_fit():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number, size in ((2, 6), (1, 5), (0, 4)):
                x = nn.tanh(nn.Dense(size, name=f"up_{number}")(x))
            return x

    class Native(nnx.Module):
        def __init__(self):
            sizes = (4, 6), (6, 5), (5, 4)
            self.up = nnx.List([nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes])

        def __call__(self, x):
            for layer in self.up:
                x = nnx.tanh(layer(x))
            return x

    variables = random_values(shapes_of(Linen(), X))
    assert {e.kind for e in port.plan(variables, Native()).problems} == {"mis-shaped"}
    found = suggested(Linen(), Native(), variables=variables)
    assert [each.is_disputed for each in found.proposals] == [True]
    # A trace is not needed.
    assert port.suggest(variables, Native()).rules == found.rules


def test_parameters_of_a_module_follow_the_calls_as_modules_do():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, last = (self.param(name, nn.initializers.normal(), (4, 4)) for name in "ab")
            return nn.tanh(x @ first) @ last

    class Native(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Param(jnp.zeros((4, 4))) for _ in range(2))

        def __call__(self, x):
            return nnx.tanh(x @ self.b[...]) @ self.a[...]

    assert suggested(Linen(), Native()).rules == {"a": "b", "b": "a"}


@pytest.mark.parametrize("names", [("layer_0", "layer_1"), ("Dense_0", "Dense_1")])
def test_a_plan_says_which_equal_names_rest_on_numbers(names):
    variables = random_values(shapes_of(LinenChain((*names, "head")), X))

    class Native(nnx.Module):
        def __init__(self):
            for name in (*names, "head"):
                setattr(self, name, nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    plan = port.plan(variables, Native())
    rules = {entry.target[0]: entry.rule for entry in plan.entries}
    assert {rules[f"{name}.kernel"] for name in names} == {"Dense, by number"}
    assert rules["head.kernel"] == "Dense"
    assert "by number" in str(plan)
