"""Models whose own class stays Linen, and what can be proven of them nevertheless."""

from __future__ import annotations

import jax
from flax import linen as nn


class Layer(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))
        return nn.relu(x)


class Tower(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x, *, train=False):
        for _ in range(self.depth):
            x = Layer()(x, train)
        return x


class Table(nn.Module):
    """It is called by other methods than `__call__`."""

    size: int = 5

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(), (self.size, 4))

    def encode(self, tokens):
        return self.table[tokens]

    def decode(self, x):
        return x @ self.table.T


class Shares(nn.Module):
    """it is given modules, and only a class that stays Linen makes it"""

    table: nn.Module

    @nn.compact
    def __call__(self, tokens):
        return Layer()(self.table.encode(tokens))


class Summed(nn.Module):
    """only a class that stays Linen can run it"""

    @nn.compact
    def __call__(self, x):
        return jax.lax.psum(nn.Dense(4)(x), "batch")


class Model(nn.Module):
    """It stays Linen, with parts of every kind."""

    @nn.compact
    def __call__(self, tokens, train=False):
        table = Table()
        x = Shares(table)(tokens) + len(self.path)
        x = Tower()(x, train=train)
        x = Tower(1)(x, train=train)
        summed = nn.vmap(
            Summed,
            variable_axes={"params": None},
            split_rngs={"params": False},
            axis_name="batch",
        )
        return table.decode(summed(name="summed")(x)).sum()


class Alone(nn.Module):
    """Nothing in it can be rewritten."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, ()) + len(self.path)
