"""The same small models in Linen and in native NNX, with the same weights, and faults for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

WIDTH = 4
X = jnp.asarray(np.random.default_rng(7).normal(size=(3, WIDTH)), jnp.float32)


class LinenBlock(nn.Module):
    """A residual block whose square kernel can be transposed unnoticed by its shape."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(WIDTH, name="dense")(nn.relu(y))


class LinenDeep(nn.Module):
    """A list of blocks."""

    depth: int

    def setup(self):
        self.layers = [LinenBlock() for _ in range(self.depth)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class NNXBlock(nnx.Module):
    """`LinenBlock` in NNX, with what a mistake in a migration may change."""

    def __init__(self, *, rngs, bias=True):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=bias, rngs=rngs)
        self.activation = nnx.relu
        self.cut = False

    def __call__(self, x):
        y = self.dense(self.activation(self.norm(x)))
        return x + (jax.lax.stop_gradient(y) if self.cut else y)


class NNXDeep(nnx.Module):
    """`LinenDeep` in NNX."""

    def __init__(self, depth, *, rngs):
        self.layers = nnx.List([NNXBlock(rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def linen_deep(depth):
    """The Linen model and its variables, all of them random, biases and scales too."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(scale=0.5, size=shape), jnp.float32)

    blocks = {
        f"layers_{index}": {
            "norm": {"scale": 1 + normal(WIDTH), "bias": normal(WIDTH)},
            "dense": {"kernel": normal(WIDTH, WIDTH), "bias": normal(WIDTH)},
        }
        for index in range(depth)
    }
    return LinenDeep(depth), {"params": blocks}


def nnx_deep(variables, depth):
    """The native NNX model with the Linen model's weights, copied by hand."""
    model = nnx.eval_shape(lambda: NNXDeep(depth, rngs=nnx.Rngs(1)))
    for index, block in enumerate(model.layers):
        fill(block, variables["params"][f"layers_{index}"])
    return model


def fill(block, params):
    """Puts a Linen block's parameters into the native one."""
    block.norm.scale.set_value(params["norm"]["scale"])
    block.norm.bias.set_value(params["norm"]["bias"])
    block.dense.kernel.set_value(params["dense"]["kernel"])
    block.dense.bias.set_value(params["dense"]["bias"])


def randomised(variables: Any):
    """Variables with a random value for every leaf, so that nothing is equal by its initialiser."""
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda v: jnp.asarray(1 + 0.3 * draw.normal(size=v.shape), v.dtype), variables
    )


class LinenNet(nn.Module):
    """Running statistics, dropout and a head."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(WIDTH, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2, name="last")(x)


class NNXNet(nnx.Module):
    """`LinenNet` in NNX."""

    def __init__(self, *, rngs, momentum=0.9):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


def linen_net():
    """The Linen model and its variables."""
    module = LinenNet()
    return module, randomised(jax.eval_shape(module.init, jax.random.key(0), X))


def nnx_net(variables, **options):
    """The native NNX model with the Linen model's values."""
    model = NNXNet(rngs=nnx.Rngs(1), **options)
    params, stats = variables["params"], variables["batch_stats"]
    for name in ("first", "last"):
        getattr(model, name).kernel[...] = params[name]["kernel"]
        getattr(model, name).bias[...] = params[name]["bias"]
    model.norm.scale[...] = params["norm"]["scale"]
    model.norm.bias[...] = params["norm"]["bias"]
    model.norm.mean[...] = stats["norm"]["mean"]
    model.norm.var[...] = stats["norm"]["var"]
    return model


def transposed(kernel: jax.Array) -> jax.Array:
    """A square kernel the wrong way round, which no shape tells."""
    return jnp.swapaxes(kernel, 0, 1)
