"""A model twice: a Linen one with automatic names, and its NNX re-implementation with names."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from tests.port.cases import random_values


class LinenBlock(nn.Module):
    """A residual block."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        return x + nn.Dense(4)(nn.gelu(nn.Dense(6)(y)))


class LinenNet(nn.Module):
    """Embedding, two blocks, a head."""

    def setup(self):
        self.embed = nn.Embed(5, 4)
        self.block_0 = LinenBlock()
        self.block_1 = LinenBlock()
        self.head = nn.Dense(3)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(self.block_1(self.block_0(x)))


class Block(nnx.Module):
    """`LinenBlock` in NNX."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.down = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    """`LinenNet` in NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = {r"block_(\d+)": r"blocks.\1"}
TOKENS = jnp.array([[0, 3, 1], [4, 2, 2]])


def shapes_of(module, *inputs):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))


def net_variables(seed=0):
    return random_values(shapes_of(LinenNet(), TOKENS), seed)
