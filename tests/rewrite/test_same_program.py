"""Two models are one program only if all of their results and gradients are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend import core

from bridge import parity, port
from bridge.rewrite.prove._draws import same_key, with_same_keys
from bridge.rewrite.prove._same_program import Numbering, compare_programs
from bridge.rewrite.prove._weights import random_variables

X = jax.ShapeDtypeStruct((2, 4), "float32")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, y, train=False):
        h = nn.Dense(4, name="a")(x) - nn.Dense(4, name="b")(y)
        h = nn.relu(nn.LayerNorm(name="norm")(h))
        h = nn.BatchNorm(name="stats")(h, use_running_average=not train)
        return nn.Dropout(0.5)(h, deterministic=not train)


class Native(nnx.Module):
    """The same model, of which subclasses change one thing each."""

    epsilon = 1e-6

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, epsilon=self.epsilon, rngs=rngs)
        self.stats = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def first(self, x, y):
        return self.a(x) - self.b(y)

    def activation(self, x):
        return nnx.relu(x)

    def __call__(self, x, y, train=False):
        h = self.activation(self.norm(self.first(x, y)))
        h = self.stats(h, use_running_average=not train)
        return self.dropout(h, deterministic=not train)


class OtherOrder(Native):
    def first(self, x, y):
        b = self.b(y)
        return self.a(x) - b


class OtherInputs(Native):
    def first(self, x, y):
        return self.a(y) - self.b(x)


class OtherWeights(Native):
    def first(self, x, y):
        return self.b(x) - self.a(y)


class OtherEpsilon(Native):
    epsilon = 1e-5


class OtherFunction(Native):
    def activation(self, x):
        return nnx.relu6(x)


class OtherGradient(Native):
    def activation(self, x):
        return nnx.relu(jax.lax.stop_gradient(x))


class RelatedGradient(Native):
    def activation(self, x):
        return relu(x)


@jax.custom_jvp
@jax.jit
def relu(x):
    """Has the name and the operations of `jax.nn.relu`, and another gradient."""
    return jnp.maximum(x, 0)


relu.defjvps(lambda g, ans, x: 2 * g)


class OtherState(Native):
    def __call__(self, x, y, train=False):
        h = self.activation(self.norm(self.first(x, y)))
        found = self.stats(h, use_running_average=not train)
        if train:
            self.stats.mean[...] = self.stats.mean[...] + 1
        return self.dropout(found, deterministic=not train)


class OtherDropout(Native):
    def __call__(self, x, y, train=False):
        h = self.activation(self.norm(self.first(x, y)))
        return self.stats(h, use_running_average=not train)


class OtherTree(Native):
    def __call__(self, x, y, train=False):
        return (super().__call__(x, y, train),)


def reversal(factor, name):
    """Its result does not depend on the factor, which only the gradient holds."""

    def reverse(x, s):
        return x

    if name == "input":
        reverse = jax.custom_vjp(reverse)
        reverse.defvjp(lambda x, s: (x, s), lambda s, g: (-s * g, jnp.zeros_like(s)))
        return lambda x: reverse(x, jnp.float32(factor))
    if name == "not differentiated":
        reverse = jax.custom_vjp(reverse, nondiff_argnums=(1,))
        reverse.defvjp(lambda x, s: (x, None), lambda s, _, g: (-s * g,))
        return lambda x: reverse(x, factor)
    reverse = jax.custom_vjp(lambda x: x)
    reverse.defvjp(lambda x: (x, None), lambda _, g: (-factor * g,))
    return reverse


class LinenFunction(nn.Module):
    function: Any

    @nn.compact
    def __call__(self, x):
        return self.function(nn.Dense(4, name="a")(x))


class NativeFunction(nnx.Module):
    def __init__(self, function, rngs):
        self.a, self.function = nnx.Linear(4, 4, rngs=rngs), function

    def __call__(self, x):
        return self.function(self.a(x))


def is_same_with(function, other):
    """Whether one function behind a layer is taken for another."""
    linen = LinenFunction(function)
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(0), X))
    model = NativeFunction(other, nnx.Rngs(0))
    port.plan(variables, model).apply()
    return compare_programs((linen, variables), model, (jnp.ones(X.shape),), {}).same


def pair(cls):
    linen = Linen()
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(0), X, X))
    model = cls(nnx.Rngs(0))
    port.plan(variables, model).apply()
    with_same_keys(model)
    return (linen, variables), model


def is_same(cls, *, train=False):
    """Both inputs are equal, which must not hide that they are taken for each other."""
    linen, model = pair(cls)
    x = jnp.ones(X.shape)
    keys = {"dropout": same_key()}
    return compare_programs(linen, model, (x, x), {"train": train}, keys=keys, state=train).same


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("cls", [Native, OtherOrder])
def test_the_same_operations_are_one_program(cls, train):
    assert is_same(cls, train=train)


@pytest.mark.parametrize(
    "cls",
    [
        OtherInputs,
        OtherWeights,
        OtherEpsilon,
        OtherFunction,
        OtherGradient,
        RelatedGradient,
        OtherTree,
    ],
)
def test_one_operation_less_or_more_is_another_program(cls):
    assert not is_same(cls)


@pytest.mark.parametrize("cls", [OtherState, OtherDropout])
def test_what_only_training_does_is_seen_in_training(cls):
    assert is_same(cls)
    assert not is_same(cls, train=True)


def test_parity_finds_nothing_where_both_are_one_program():
    linen, model = pair(Native)
    x, y = jax.random.normal(jax.random.key(1), (2, *X.shape))
    report = parity.check(
        linen,
        model,
        x,
        y,
        kwargs={"train": False},
        options=parity.Options(tolerances={"float32": 0}),
    )
    assert report.ok, str(report)


def test_weights_that_cannot_be_told_apart_are_not_taken_for_each_other():
    linen, _ = pair(Native)
    zeros = jax.tree.map(jnp.zeros_like, linen[1])
    model = OtherWeights(nnx.Rngs(0))
    port.plan(zeros, model).apply()
    x = jnp.ones(X.shape)
    assert not compare_programs((linen[0], zeros), model, (x, x), {"train": False}).same


@pytest.mark.parametrize("name", ["input", "not differentiated", "closure"])
def test_gradients_of_other_rules_are_not_taken_for_each_other(name):
    one, two = reversal(1.0, name), reversal(2.0, name)
    x = jnp.ones(X.shape)
    assert (one(x) == two(x)).all()
    assert (jax.grad(lambda x: one(x).sum())(x) != jax.grad(lambda x: two(x).sum())(x)).all()
    assert not is_same_with(one, two)


def test_a_rule_of_jax_is_known_by_its_name():
    assert is_same_with(jax.nn.relu, nnx.relu)
    assert not is_same_with(jax.nn.relu, lambda x: jnp.maximum(x, 0))


def test_a_weight_that_is_held_twice_has_two_gradients():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="a")
            return layer(layer(x))

    class Untied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.b(self.a(x))

    linen, model = Tied(), Untied(nnx.Rngs(0))
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(0), X))
    for layer in (model.a, model.b):
        layer.kernel[...] = variables["params"]["a"]["kernel"]
        layer.bias[...] = variables["params"]["a"]["bias"]
    x = jnp.ones(X.shape)
    assert (linen.apply(variables, x) == model(x)).all()
    assert not compare_programs((linen, variables), model, (x,), {}).same
    model.b = model.a
    assert compare_programs((linen, variables), model, (x,), {}).same


def test_closures_of_one_factory_are_other_functions():
    """An operation may have a function among its parameters."""
    operation = core.Primitive("apply")
    operation.def_impl(lambda x, function: function(x))
    operation.def_abstract_eval(lambda x, function: x)

    def scaling(factor):
        return lambda x: factor * x

    def call(function):
        return lambda x: operation.bind(x, function=function)

    function = scaling(1)
    assert is_same_with(call(function), call(function))
    assert not is_same_with(call(function), call(scaling(2)))


def test_an_error_of_the_numbering_is_not_an_answer(monkeypatch):
    def fails(*args):
        raise KeyError("numbering")

    monkeypatch.setattr(Numbering, "_equation", fails)
    with pytest.raises(KeyError, match="numbering"):
        is_same(Native)
