"""Styles of public programs: fields, names and arguments that are given in their own ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def scaled_init(scale):
    def init(key, shape, dtype=jnp.float32):
        return scale * jax.random.normal(key, shape, dtype)

    return init


def squared(x):
    return x * x


class Embedding(nn.Module):
    """The default of a field is a function of the program, and a field is no argument."""

    width: int
    start: Callable[..., Any] = scaled_init(0.5)
    activation: Callable[..., Any] = squared
    table: Any = dataclasses.field(init=False)

    def setup(self):
        self.table = self.param("table", self.start, (self.width, 3))

    def __call__(self, x):
        return self.activation(x @ self.table)


def add_positions(self, kind, x, shape, name, dtype):
    if kind == "learned":
        return x + self.param(name, nn.initializers.normal(1 / shape[-1]), (1, *shape), dtype)
    return x + jnp.ones((1, *shape), dtype)


class Positions(nn.Module):
    """A function has `self` for an argument, and one for the name of the parameter."""

    kind: str = "learned"

    @nn.compact
    def __call__(self, x):
        return add_positions(self, self.kind, x, x.shape[1:], f"{self.kind}_table", x.dtype)


def noisy(x, deterministic, make_rng):
    return x if deterministic else x + jax.random.normal(make_rng("dropout"), x.shape)


class Noisy(nn.Module):
    """A function is given the method that draws keys."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        return noisy(nn.Dense(3)(x), deterministic, self.make_rng)


class Wide(nn.Module):
    """A size that is not told follows from the input."""

    width: int | None = None
    factor: int | None = None

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1]
        y = nn.relu(nn.Dense(self.width or 4 * size)(x))
        y = nn.Dense(size if self.factor is None else self.factor * size)(y)
        return nn.Dense(size, use_bias=False)(y)


class Head(nn.Module):
    """Arguments in a dict that is made where it is needed."""

    classes: int = 3
    zeros: bool = False

    @nn.compact
    def __call__(self, x):
        if self.classes:
            options = {"kernel_init": nn.initializers.zeros} if self.zeros else {}
            x = nn.Dense(self.classes, **options)(x)
        return x


class Block(nn.Module):
    width: int = 3

    def setup(self): self.dense = nn.Dense(self.width)  # fmt: skip

    def __call__(self, x):
        return self.dense(x)


class Named(nn.Module):
    """What is in a list has names of its own."""

    depth: int = 2

    def setup(self):
        self.blocks = [Block(name=str(i)) for i in range(self.depth)]
        self.pair = [Block(name="first"), nn.Dense(3, name="second")]
        self.late = tuple(Block(name=f"late{i}") for i in range(self.depth))

    def __call__(self, x):
        for block in [*self.blocks, *self.pair, *self.late]:
            x = block(x)
        return x


class Attention(nn.Module):
    """The cache is there in a program that decodes, which this one does not."""

    @nn.compact
    def cached(self, x):
        cache = self.variable("cache", "cached", jnp.zeros, x.shape)
        cache.value = cache.value + x
        return cache.value

    @nn.compact
    def __call__(self, x, init_cache=False):
        x = nn.Dense(3)(x)
        if self.has_variable("cache", "cached"):
            x = x + self.variables["cache"]["cached"].shape[0]
        if self.has_variable("cache", "cached") or init_cache:
            x = self.cached(x)
        return x


class Root(nn.Module):
    width: int | None = 5

    @nn.compact
    def __call__(self, x, train=False):
        x = Positions("constant")(Positions()(Embedding(3)(x)))
        x = Noisy()(x, deterministic=not train)
        x = Wide(factor=2)(Wide(self.width)(x))
        return Attention()(Named()(Head()(x)))


class Block1D(nn.Module):
    """A class whose name ends in a dimension."""

    width: int

    @nn.compact
    def __call__(self, x, mask):
        rows = self.param("rows", nn.zeros, (mask.shape[1],))
        return nn.Dense(self.width)(x) + rows.sum()


class Words(nn.Module):
    """Sizes that are not the last one: by the program's words, by Flax's, and by their number."""

    @nn.compact
    def __call__(self, image, tokens, pairs):
        _, height, w, _ = image.shape
        image = image + self.param("table", nn.ones, (height, w, 1))
        tokens = tokens + self.param("positions", nn.zeros, (1, tokens.shape[1], 1))
        image = Block1D(4)(image, pairs)
        return image.sum() + tokens.sum()


class Told(nn.Module):
    """Fields that are told of."""

    # How wide
    # the layers are.
    width: int = 4

    depth: int = 2  # how many
    """All of them.

    None is one that only multiplies."""

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.Dense(self.width)(x)
        return x


class Shifted(nn.Module):
    """A layer of `setup` that is called only if the call has one more argument."""

    width: int = 4

    def setup(self):
        self.dense = nn.Dense(self.width)
        self.shift = nn.Dense(self.width)
        if self.width > 1:
            self.scale = nn.Dense(self.width)
            self.more = nn.Dense(self.width)
        if self.width > 3:
            self.other = nn.Dense(self.width)
        else:
            self.none = None

    def __call__(self, x, time=None):
        x = self.dense(x)
        if time is not None:
            x = x * self.scale(time) * self.more(time) + self.shift(nn.swish(time))
            x = x + self.other(time)
        return x


class Spatial(nn.Module):
    """A layer that is given the sizes of an image."""

    height: int
    width: int

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(), (self.height, self.width, 1))
        return (x * table).sum((1, 2))


class Square(nn.Module):
    """Sizes that are equal in the square image that the model is rewritten with."""

    features: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (3, 3), (2, 2))(x)
        height, width, _ = x.shape[-3:]
        return Spatial(height=height, width=width)(x)
