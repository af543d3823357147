"""A ToLinen creates its variables where Linen's own modules create theirs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))
MODELS = {"bridged": bridge.to_linen(nnx.Linear, 3, 2), "linen": nn.Dense(2)}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_apply_creates_what_is_missing_where_the_collection_is_mutable(model):
    rngs = {"params": KEY}
    y, created = model.apply({}, X, rngs=rngs, mutable=True)
    expected, variables = model.init_with_output(rngs, X)
    assert_identical(y, expected)
    assert_identical(created["params"], variables["params"])


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_apply_without_variables_is_linen_s_error_where_it_is_not(model):
    with pytest.raises(flax_errors.ScopeCollectionNotFound):
        model.apply({}, X, mutable=["batch_stats"])


def test_a_lifted_transform_that_would_leave_a_variable_behind_is_refused():
    lifted = nn.vmap(
        bridge.ToLinen, variable_axes={"params": 0}, split_rngs={"params": True}
    )(nnx.BatchNorm, (3,), name="m")  # fmt: skip
    with pytest.raises(bridge.MismatchError) as caught:
        lifted.init(KEY, jnp.ones((2, 4, 3)))
    assert {path for path, _ in caught.value.missing} == {"batch_stats/mean", "batch_stats/var"}
    assert "Name the collection in the transform: in variable_axes" in str(caught.value)


class Donating(nnx.Module):
    """Donates its state to the program that it runs."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linen = bridge.ToNNX(nn.Dense(2), rngs=rngs)
        self.calls = nnx.BatchStat({"count": jnp.zeros(())})

    def __call__(self, x):
        x = self.linen(x)

        @functools.partial(nnx.jit, donate_argnums=0)
        def call(model, x):
            model.calls.set_value({"count": model.calls["count"] + 1})
            return model.dropout(model.linear(jnp.pad(x, [(0, 0), (0, 1)])))

        return call(self, x)


def test_init_keeps_the_initial_values_that_the_call_donates():
    """Regression: RuntimeError, as the arrays had been deleted."""
    model = bridge.to_linen(Donating)
    expected = jax.jit(model.init)(KEY, X)
    assert_close(model.init(KEY, X), expected)
