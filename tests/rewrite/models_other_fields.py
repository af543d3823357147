"""Classes that may do something else for other values of their fields."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn


class Kind(enum.Enum):
    RELU = 1
    TANH = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 6
    scale: float = 1.0


class Plain(nn.Module):
    """Holds for every value."""

    width: int = 5
    depth: int = 2
    use_bias: bool = True
    scale: float = 0.5

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1]
        for _ in range(self.depth):
            x = nn.tanh(nn.Dense(self.width, use_bias=self.use_bias)(x))
        return self.scale * nn.Dense(size)(x)


class Configured(nn.Module):
    """Holds for every value of its configuration."""

    config: Config = Config()
    activation: Literal["relu", "tanh"] = "relu"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.config.width)(x)
        x = nn.relu(x) if self.activation == "relu" else jnp.tanh(x)
        return nn.Dense(8)(self.config.scale * x)


class Skipping(nn.Module):
    """A layer that a flag turns off, before one whose input size is the same by chance."""

    use: bool = True
    width: int = 8

    @nn.compact
    def __call__(self, x):
        if self.use:
            x = nn.Dense(self.width)(x)
        return nn.Dense(8)(x)


class Shortening(nn.Module):
    """Channels come back in the reverse order."""

    channels: Sequence[int] = (8, 4, 2)

    @nn.compact
    def __call__(self, x):
        kept = []
        for channels in self.channels:
            x = nn.Dense(channels)(x)
            kept.append(x)
        for channels in reversed(self.channels):
            x = nn.Dense(channels)(jnp.concatenate([x, kept.pop()], -1))
        return nn.Dense(8)(x)


class Choosing(nn.Module):
    """Compares with a member of an enumeration of its own file."""

    kind: Kind = Kind.RELU

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        return jnp.tanh(x) if self.kind is Kind.TANH else nn.relu(x)


class Refusing(nn.Module):
    """Takes no other width than that of its input."""

    width: int = 8

    @nn.compact
    def __call__(self, x):
        if self.width != x.shape[-1]:
            raise ValueError("the width is another one")
        return x + nn.Dense(self.width)(x)


class Grouped(nn.Module):
    groups: int = 2

    @nn.compact
    def __call__(self, x):
        groups = min(self.groups, x.shape[-1] // 4)
        return nn.Dense(8 * groups)(x)[:, :8]


class Ratio(nn.Module):
    ratio: float = 0.5

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(int(x.shape[-1] * self.ratio))(x)))


class Out(nn.Module):
    out: int | None = None

    @nn.compact
    def __call__(self, x):
        size = self.out or x.shape[-1]
        return nn.Dense(8)(nn.Dense(size)(nn.Dense(size)(x)))


class Branching(nn.Module):
    """The same in statements."""

    out: int | None = None

    @nn.compact
    def __call__(self, x):
        _, channels = x.shape
        size = 2 * channels
        if self.out is not None:
            size = self.out
        return nn.Dense(8)(nn.Dense(size)(nn.Dense(size)(x)))


class Hidden(nn.Module):
    hidden: Sequence[int] = (6, 4)

    @nn.compact
    def __call__(self, x):
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(8)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(x)


class Rematerialized(nn.Module):
    """Chooses the class in `setup`."""

    remat: bool = False

    def setup(self):
        block = nn.remat(Block) if self.remat else Block
        self.block = block()

    def __call__(self, x):
        return self.block(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Plain()(x)
        x = Configured()(x)
        x = Skipping()(x)
        x = Shortening()(x)
        x = Choosing()(x)
        x = Refusing()(x)
        x = Grouped()(x)
        x = Ratio()(x)
        x = Out()(x)
        x = Branching()(x)
        x = Hidden()(x)
        return Rematerialized()(x)


class Normed(nn.Module):
    """Gets the mode with a field."""

    width: int
    norm: Any

    @nn.compact
    def __call__(self, x):
        return self.norm()(nn.Dense(self.width)(x))


class Inner(nn.Module):
    """Takes an input of the size that its configuration says."""

    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(x)) * self.config.scale


class Drawing(nn.Module):
    """Is given a key in its call."""

    config: Config = Config()
    stddev: float = 0.5

    @nn.compact
    def __call__(self, x, key, train: bool = False):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        x = Normed(self.config.width, norm)(x)
        x = x + self.stddev * jax.random.normal(key, x.shape)
        return Inner(self.config)(x)
