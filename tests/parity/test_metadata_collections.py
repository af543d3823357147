"""Models with a collection that holds no arrays, as `param_with_axes` makes one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import partitioning

import bridge
from bridge import parity, port


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        shape, axes = (1, x.shape[-1]), ("one", "embed")
        return x * partitioning.param_with_axes("scale", nn.initializers.normal(), shape, axes=axes)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Scale(name="inner")(nn.Dense(3, name="dense")(x))


class Mixed(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.inner = bridge.ToNNX(Scale(), rngs=rngs)

    def __call__(self, x):
        return self.inner(self.dense(x))


@pytest.fixture(scope="module")
def x():
    return jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


@pytest.fixture(scope="module")
def variables(x):
    return Linen().init(jax.random.key(0), x)


@pytest.mark.parametrize("ported", [True, False])
def test_a_mixed_model_is_compared_with_the_linen_model_that_it_comes_from(x, variables, ported):
    assert list(variables) == ["params", "params_axes"]
    model = bridge.lazy_init(Mixed(rngs=nnx.Rngs(1)), x)
    if ported:
        port.plan(variables, model).apply()
    report = parity.check((Linen(), variables), model, x)
    assert report.ok is ported, str(report)
