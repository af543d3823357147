"""The paths of Linen modules inside of an NNX model."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge

X = jnp.ones((2, 4))


class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(3, name="fc")(x))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="out")(Body(name="body")(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = bridge.ToNNX(Linen(), rngs=rngs)
        self.parts = nnx.Dict(left=nnx.List([bridge.ToNNX(Linen(), rngs=rngs)]))
        self.twice = self.first

    def __call__(self, x):
        return self.parts["left"][0](self.first(x))


class LinenTwin(nn.Module):
    """The same modules in pure Linen, at the same paths."""

    @nn.compact
    def __call__(self, x):
        return Left(name="parts")(Linen(name="first")(x))


class Left(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Item(name="left")(x)


class Item(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linen(name="0")(x)


def paths_of(call):
    found = []

    def note(next_function, args, kwargs, context):
        if isinstance(context.module, nn.Dense):
            found.append((context.module.path, context.module.name))
        return next_function(*args, **kwargs)

    with nn.intercept_methods(note):
        call()
    return found


def model():
    return bridge.lazy_init(Model(nnx.Rngs(0)), X)


def test_paths_begin_at_the_model_once_they_are_told():
    module = model()
    twin = LinenTwin()
    variables = twin.init(jax.random.key(0), X)
    expected = paths_of(lambda: twin.apply(variables, X))
    assert expected[0] == (("first", "body", "fc"), "fc")
    alone = [(path[1:] if path[0] == "first" else path[3:], name) for path, name in expected]
    assert paths_of(lambda: module(X)) == alone
    y = module(X)
    assert bridge.set_module_paths(module) is module
    assert paths_of(lambda: module(X)) == expected
    assert bool((module(X) == y).all())
    assert paths_of(lambda: nnx.jit(lambda m, x: m(x))(nnx.clone(module), X)) == expected
    untold = model()
    assert paths_of(lambda: nnx.jit(lambda m, x: m(x))(untold, X)) == alone


def scopes_of(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive is jax.lax.dot_general_p]
    return [str(eqn.source_info.name_stack) for eqn in eqns]


def test_named_scopes_are_those_of_pure_linen_below_its_outermost_module():
    twin = LinenTwin()
    variables = twin.init(jax.random.key(0), X)
    expected = [stack.partition("/")[2] for stack in scopes_of(twin.apply, variables, X)]
    assert len(expected) == 4
    assert scopes_of(bridge.set_module_paths(model()), X) == expected


def test_a_wrapper_that_moves_is_told_again():
    module = bridge.set_module_paths(model())
    other = nnx.Dict(moved=module.first)
    assert paths_of(lambda: other["moved"](X))[0][0][0] == "first"
    bridge.set_module_paths(other)
    assert paths_of(lambda: other["moved"](X))[0][0] == ("moved", "body", "fc")
    bridge.set_module_paths(module.first)
    assert paths_of(lambda: module.first(X))[0][0] == ("body", "fc")


def test_errors_name_the_whole_path():
    module = bridge.set_module_paths(model())

    def draws(next_function, args, kwargs, context):
        if context.method_name == "__call__" and isinstance(context.module, nn.Dense):
            context.module.make_rng("noise")
        return next_function(*args, **kwargs)

    with (
        nn.intercept_methods(draws),
        pytest.raises(bridge.MissingRngError, match="/first/body/fc"),
    ):
        module.first(X, rngs={})
