"""Defects 5, 8 and 20 of flax.nnx.bridge, what `tests/bridge` does not hold of them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from flax import linen as nn

import bridge
from tests.bridge.peer import Defect, free_of, rejects

X = jnp.ones((4, 3))


def wrapped(bridge, **streams):
    return bridge.lazy_init(bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0, **streams)), X)


def check_05_closed_over(transform, bridge):
    model = wrapped(bridge, dropout=1)
    np.testing.assert_allclose(transform(lambda x: 2 * model(x))(X), 2 * model(X), rtol=1e-6)


def check_05_grad_closure(bridge):
    model = wrapped(bridge)
    gradient = jax.grad(lambda x: model(x).sum())(X)
    np.testing.assert_allclose(
        gradient, jnp.broadcast_to(model.kernel[...].sum(1), X.shape), rtol=1e-6
    )


def check_05_unused_streams(bridge):
    """A stream that no module asks for."""
    module = nn.Dropout(0.5, deterministic=False)
    model = bridge.ToNNX(module, rngs=nnx.Rngs(dropout=0, unused=1))
    count = model.to_nnx__rngs["unused"].count
    before = int(count[...])
    model(X)
    assert int(count[...]) == before


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.first(x) != 0, self.second(x) != 0


ONES = jnp.ones((4, 16))


def test_two_layers_have_two_masks_if_only_the_call_has_a_key():
    model = bridge.ToLinen(Noisy)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ONES)
    variables = {"nnx": variables["nnx"]}
    first, second = model.apply(variables, ONES, rngs={"dropout": jax.random.key(2)})
    assert not np.array_equal(first, second)


def check_08_no_mask_without_a_key(bridge):
    """A module with parameters, and no key for the call: nothing may be drawn."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    model = bridge.ToLinen(Layer)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = {"params": model.init(keys, ONES)["params"]}
    rejects(lambda: model.apply(params, ONES), "rngs")


def check_20_checkpoint_of_a_mixed_model(bridge):
    """A filter for parameters and statistics is all that a checkpoint needs."""
    model = bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=nnx.Rngs(0))
    bridge.lazy_init(model, X)
    variables = model.linen_variables()
    assert sorted(variables) == ["batch_stats", "params"]
    again = bridge.ToNNX.from_variables(model.to_nnx__module, variables)
    assert not jax.tree.leaves(nnx.state(again, nnx.RngState))
    np.testing.assert_array_equal(again(X), model(X))


DEFECTS = {
    "05 a call inside jax.checkpoint closes over the model": Defect(
        lambda b: check_05_closed_over(jax.checkpoint, b),
        errors.TraceContextError,
        "Cannot mutate RngCount",
    ),
    "05 a call inside jax.vmap closes over the model": Defect(
        lambda b: check_05_closed_over(jax.vmap, b),
        errors.TraceContextError,
        "Cannot mutate RngCount",
    ),
    "05 a call inside jax.grad closes over the model": Defect(
        check_05_grad_closure, errors.TraceContextError, "Cannot mutate RngCount"
    ),
    "05 a stream that nothing asks for stays": Defect(check_05_unused_streams, AssertionError),
    "08 parameters alone draw no mask": Defect(
        check_08_no_mask_without_a_key, AssertionError, "nothing was raised"
    ),
    "20 what is saved holds no stream": Defect(
        check_20_checkpoint_of_a_mixed_model, AttributeError, "no attribute 'linen_variables'"
    ),
}

test_the_bridge_is_free_of_the_defect = free_of(DEFECTS)
