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


class Concatenating(nn.Module):
    """A branch puts another array beside its input."""

    use: bool = True
    width: int = 6

    @nn.compact
    def __call__(self, x):
        y = x
        if self.use:
            y = jnp.concatenate([x, nn.Dense(self.width)(x)], -1)
        y = nn.relu(nn.Dense(7)(y))
        return nn.Dense(8)(y)


class Growing(nn.Module):
    """Each layer adds to its input, and half of that goes on behind them."""

    growth: int = 2
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            y = nn.Dense(self.growth, name=f"grow_{i}")(nn.LayerNorm(name=f"norm_{i}")(x))
            x = jnp.concatenate([x, y], axis=-1)
        x = nn.Dense(x.shape[-1] // 2, name="halve")(x)
        return nn.Dense(8, name="head")(x)


class Residual(nn.Module):
    """What a loop sets is taken up again by another name, and the sizes differ."""

    widths: Sequence[int] = (6, 6, 4)

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            before = x
            x = nn.relu(nn.Dense(width, name=f"first_{i}")(x))
            x = jnp.concatenate([x, before], -1)
            x = nn.Dense(2 * before.shape[-1], name=f"second_{i}")(x)
            x = nn.Dense(width, name=f"third_{i}")(x)
        return nn.Dense(8, name="head")(x)


class Given(nn.Module):
    """A size of the input or of a field, by a branch; a parameter that is multiplied with."""

    out: int | None = None

    @nn.compact
    def __call__(self, x):
        if self.out is None:
            size = x.shape[-1]
        elif self.out > 0:
            size = self.out
        else:
            size = 1
        w = self.param("w", nn.initializers.normal(), (x.shape[-1], size if self.out else 2 * size))
        return nn.Dense(8)(nn.Dense(size)(x @ w))


class InSetup(nn.Module):
    """A layer that a flag turns off, and a list of any length, made in `setup`."""

    use: bool = True
    width: int = 6
    hidden: Sequence[int] = (5, 4)

    def setup(self):
        if self.use:
            self.first = nn.Dense(self.width)
        self.between = [nn.Dense(width) for width in self.hidden]
        self.last = nn.Dense(8)

    def __call__(self, x):
        if self.use:
            x = self.first(x)
        for layer in self.between:
            x = nn.relu(layer(x))
        return self.last(x)


class Flattening(nn.Module):
    """Heads that are put beside each other have the size of the input by chance."""

    heads: int = 2

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4 * self.heads)(x).reshape(x.shape[0], self.heads, 4)
        return nn.Dense(8)(x.reshape(x.shape[0], -1))


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


class Returning(nn.Module):
    """Makes some layers only if it has not returned."""

    out: int | None = 6
    deep: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        if self.out is None:
            return x
        x = nn.Dense(self.out)(x)
        if not self.deep:
            return nn.Dense(8)(x)
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(8)(x)


class Small(nn.Module):
    """Has a field that is equal to a size of its input by chance, and asks for another size."""

    width: int = 3

    @nn.compact
    def __call__(self, x):
        _, tokens, _ = x.shape
        if tokens > 4:
            x = nn.Dense(self.width, name="up")(x)
        return nn.Dense(2, name="out")(x)


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Small()(x)


def shrunk(x, width):
    return x[:, : width * 7 % 5 + 1]


class Shrinking(nn.Module):
    """Has a size that another function computes of a field."""

    width: int = 6

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(shrunk(x, self.width))


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
        x = Concatenating()(x)
        x = Growing()(x)
        x = Residual()(x)
        x = Given()(x)
        x = InSetup()(x)
        x = Flattening()(x)
        x = Returning()(x)
        x = Shrinking()(x)
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
