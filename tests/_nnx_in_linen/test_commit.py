"""A call of a ToLinen changes nothing before it is committed, and then everything at once."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._nnx_in_linen.bound_module import BoundModule, Call
from bridge._nnx_in_linen.scope import WrapperScope
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.arange(6.0).reshape(2, 3)


class Normed(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, deterministic):
        return self.dropout(x, deterministic=deterministic)


def prepared(linen):
    scope = WrapperScope(linen)
    leaves, graphdef = scope.read()
    found = scope.matched(graphdef, leaves)
    return scope, BoundModule(found)


def test_a_call_writes_when_it_is_committed_and_not_before():
    def steps(linen):
        before = jax.tree.map(jnp.copy, linen.variables)
        scope, module = prepared(linen)
        y = module.call(Call(None, (X,), {}))
        assert_identical(linen.variables, before)
        module.changes.commit(scope)
        return y

    model = bridge.to_linen(Normed)
    variables = model.init(KEY, X)
    y, updates = model.apply(variables, method=steps, mutable=["batch_stats"])
    native = Normed(rngs=nnx.Rngs(0))
    assert_identical(y, native(X))
    expected = nnx.to_pure_dict(nnx.state(native, nnx.BatchStat))
    assert_identical(updates, {"batch_stats": expected})


def test_a_call_that_fails_leaves_the_variables_alone():
    def failing(module, x):
        module.norm(x)
        raise ZeroDivisionError

    def steps(linen):
        before = jax.tree.map(jnp.copy, linen.variables)
        with pytest.raises(ZeroDivisionError):
            linen(X, nnx_method=failing)
        assert_identical(linen.variables, before)

    model = bridge.to_linen(Normed)
    model.apply(model.init(KEY, X), method=steps, mutable=True)


class Twice(nn.Module):
    """Draws a key in the scope of the ToLinen after the ToLinen was called."""

    draws: bool

    @nn.compact
    def __call__(self, x):
        inner = bridge.to_linen(Dropped, name="inner")
        inner(x, not self.draws)
        return jax.random.key_data(inner.make_rng("dropout"))


class Pure(nn.Module):
    """What Linen draws in a scope of that name, after so many draws."""

    draws: int

    @nn.compact
    def __call__(self, x):
        inner = nn.Dense(1, name="inner")
        inner(x)
        for _ in range(self.draws):
            inner.make_rng("dropout")
        return jax.random.key_data(inner.make_rng("dropout"))


@pytest.mark.parametrize("draws", [0, 1])
def test_a_key_that_the_call_has_not_used_is_drawn_again(draws):
    rngs = {"dropout": jax.random.key(4)}
    model, pure = Twice(bool(draws)), Pure(draws)
    variables = model.init({"params": KEY, "dropout": KEY}, X)
    of_linen = pure.init({"params": KEY, "dropout": KEY}, X)
    assert_identical(model.apply(variables, X, rngs=rngs), pure.apply(of_linen, X, rngs=rngs))
