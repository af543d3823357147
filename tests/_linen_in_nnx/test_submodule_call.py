"""A call of a submodule is one of the whole Linen module, so that its updates are kept."""

import inspect

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._linen_in_nnx.submodule_call import At, run_at
from tests.models import assert_identical

X = jnp.arange(6.0).reshape(2, 3)


class Inner(nn.Module):
    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False)

    def __call__(self, x):
        return self.norm(x)

    def scaled(self, x, *, method=2.0):
        return method * self.norm(x)


class Outer(nn.Module):
    def setup(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x)


class Lazy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def model():
    return bridge.ToNNX(Outer(), nnx.Rngs(0), mutable=["batch_stats"]).lazy_init(X)


def test_output_and_updates_are_those_of_linen_s_apply():
    wrapper = model()
    variables = wrapper.linen_variables()
    y = run_at(("inner",), "__call__", wrapper, X)
    expected, updates = Outer().apply(
        variables, X, method=lambda m, x: m.inner(x), mutable=["batch_stats"]
    )
    assert_identical(y, expected)
    assert_identical(wrapper.linen_variables(), {**variables, **updates})


def test_a_method_may_have_an_argument_called_method():
    wrapper = model()
    once = run_at(("inner",), "__call__", model(), X)
    assert_identical(run_at(("inner",), "scaled", wrapper, X, method=4.0), 4.0 * once)


def test_the_signature_is_that_of_the_submodule_s_method():
    bound = Inner()
    function = At(("inner",), "scaled", bound, {})
    assert inspect.signature(function) == inspect.signature(Inner.scaled)
    assert not hasattr(At(("inner",), "scaled", None, {}), "__wrapped__")


def test_a_submodule_that_only_a_call_makes_cannot_be_called():
    wrapper = bridge.ToNNX(Lazy(), nnx.Rngs(0)).lazy_init(X)
    with pytest.raises(bridge.InvalidMethodError, match="Dense_0 of Lazy cannot be called"):
        run_at(("Dense_0",), "__call__", wrapper, X)
