"""Calls of an initialised ToNNX that create variables, against `init` of the pure Linen model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import MismatchError
from tests.models import assert_close

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


def adapted(next_function, args, kwargs, context):
    """Adds a parameter to every Dense, and puts half of its bias there."""
    scope = context.module.scope
    if context.method_name != "__call__" or not isinstance(context.module, nn.Dense):
        return next_function(*args, **kwargs)
    y = next_function(*args, **kwargs)
    adapter = scope.param("adapter", nn.initializers.normal(), (4, 1))
    if context.module.is_initializing():
        scope.put_variable("params", "bias", scope.get_variable("params", "bias") + 0.5)
    return y + args[0] @ adapter


def make(seed=0):
    return bridge.ToNNX(Model(), rngs=nnx.Rngs(seed, dropout=1)).lazy_init(X)


def test_variables_are_created_beside_others_and_replaced_in_place():
    model = make()
    before = dict(nnx.to_flat_state(nnx.state(model)))
    kernel, bias = model.Dense_0.kernel, model.Dense_0["bias"]
    values = model.linen_variables()
    with nn.intercept_methods(adapted), bridge.creating_variables():
        model(X)
    after = dict(nnx.to_flat_state(nnx.state(model)))
    assert after.keys() - before.keys() == {("Dense_0", "adapter"), ("Dense_1", "adapter")}
    assert model.Dense_0.kernel is kernel
    assert model.Dense_0["bias"] is bias
    assert bias.shape == (4,)
    assert not isinstance(model.Dense_0.adapter.get_value(), jax.core.Tracer)
    # As in an `init`, statistics are not updated.
    jax.tree.map(
        np.testing.assert_array_equal,
        model.linen_variables()["batch_stats"],
        values["batch_stats"],
    )
    # And then it is a model with these variables.
    variables = model.linen_variables()
    key = jax.random.key(3)
    with nn.intercept_methods(adapted):
        expected, _ = Model().apply(variables, X, rngs={"dropout": key}, mutable=["batch_stats"])
        assert_close(model(X, rngs={"dropout": key}, mutable=["batch_stats"]), expected)


def test_without_it_a_call_creates_what_mutable_admits_and_nothing_else():
    model = make()
    with nn.intercept_methods(adapted), pytest.raises(MismatchError, match="adapter"):
        model(X, mutable=["batch_stats"])
    assert "adapter" not in model.Dense_0
    with nn.intercept_methods(adapted):
        model(X, mutable=["batch_stats", "params"])
    assert model.Dense_0.adapter.shape == (4, 1)


def test_every_wrapper_creates_its_own_and_native_state_stays_changed():
    class Both(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([make(0), make(1)])
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return sum(part(x) for part in self.parts)

    model = Both()
    with nn.intercept_methods(adapted), bridge.creating_variables():
        model(X)
    assert [part.Dense_1.adapter.shape for part in model.parts] == [(4, 1)] * 2
    assert model.calls[...] == 1
    assert not np.array_equal(model.parts[0].Dense_1.adapter, model.parts[1].Dense_1.adapter)


def test_a_call_that_creates_nothing_changes_nothing():
    model = make()
    graphdef, state = nnx.split(model)
    with bridge.creating_variables():
        model(X)
    assert nnx.graphdef(model) == graphdef
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(*map(bits, (a, b))), nnx.state(model), state
    )


def bits(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_a_call_that_fails_creates_nothing():
    def fails(next_function, args, kwargs, context):
        y = adapted(next_function, args, kwargs, context)
        if context.module.name == "Dense_1":
            raise ZeroDivisionError
        return y

    model = make()
    before = nnx.graphdef(model)
    with (
        pytest.raises(ZeroDivisionError),
        nn.intercept_methods(fails),
        bridge.creating_variables(),
    ):
        model(X)
    assert nnx.graphdef(model) == before
    assert not model.Dense_0["bias"].any()
