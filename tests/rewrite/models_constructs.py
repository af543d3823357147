"""One small model for each construct of Linen programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Base(nn.Module):
    """A parent with fields, a layer and methods."""

    width: int = 4

    def setup(self):
        self.first = nn.Dense(self.width)

    def embed(self, x):
        return nn.relu(self.first(x))

    @property
    def double(self):
        return 2 * self.width


class Child(Base):
    out: int = 3

    def setup(self):
        super().setup()
        self.second = nn.Dense(self.double)

    def __call__(self, x):
        return self.second(self.embed(x))


class Abstract(nn.Module):
    """A parent without layers."""

    def activate(self, x):
        return nn.tanh(x)


class CompactChild(Abstract):
    size: int = 5

    @nn.compact
    def __call__(self, x):
        return self.activate(nn.Dense(self.size)(x))


class Inherited(nn.Module):
    @nn.compact
    def __call__(self, x):
        return CompactChild(6)(Child()(x))


class Stack(nn.Module):
    """Classes and functions as fields, with dictionaries of layers."""

    layer: Any = nn.Dense
    norm: Any = nn.LayerNorm
    act: Callable = nn.gelu

    def setup(self):
        self.heads = {"a": self.layer(3), "b": self.layer(2)}
        self.scale = self.norm()

    def __call__(self, x):
        y = self.scale(self.act(x))
        return {name: head(y) for name, head in self.heads.items()}


class Conditional(nn.Module):
    """Layers under conditions, in conditional expressions and in comprehensions."""

    use_bias: bool = True
    deep: bool = False
    proj: int | None = 5
    sizes: tuple[int, ...] = (4, 3)

    @nn.compact
    def __call__(self, x):
        if self.deep:
            x = nn.Dense(9)(x)
            x = nn.relu(x)
        else:
            x = nn.Dense(7, use_bias=self.use_bias)(x)
        x = nn.Dense(self.proj, name="proj")(x) if self.proj is not None else x
        outs = [nn.Dense(size, name=f"out_{i}")(x) for i, size in enumerate(self.sizes)]
        return jnp.concatenate(outs, axis=-1)


class Both(nn.Module):
    """`setup` beside a compact method."""

    width: int = 4

    def setup(self):
        self.inner = nn.Dense(self.width)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="outer")(nn.relu(self.inner(x)))


class Statistics(nn.Module):
    """A variable of its own, a parameter from the input's shape, and a sown value."""

    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, train: bool = False):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (x.shape[-1],))
        count = self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.float32))
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if train and not self.is_initializing():
            mean.value = self.momentum * mean.value + (1 - self.momentum) * x.mean(0)
            count.value += 1
        self.sow("intermediates", "features", x)
        return (x - mean.value) * scale


class Shared(nn.Module):
    """One layer called twice, and one block called twice."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(x.shape[-1], name="shared")
        block = CompactChild(x.shape[-1])
        return block(block(dense(dense(x))))


class Wrapped(nn.Module):
    """Layers that NNX lacks."""

    @nn.compact
    def __call__(self, x):
        x = nn.ConvLocal(3, (2,), name="local")(x)
        return nn.RNN(nn.GRUCell(4), name="gru")(x)


class Modes(nn.Module):
    """A mode that a child takes in its constructor."""

    deterministic: bool
    rate: float = 0.5

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(self.rate, deterministic=self.deterministic)(nn.Dense(4)(x))
        return nn.BatchNorm(use_running_average=self.deterministic)(x)


class ModeParent(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            x = Modes(deterministic=not train)(x)
        return x


class Normed(nn.Module):
    """Positional modes and epsilons."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.LayerNorm(1e-5)(x)
        x = nn.BatchNorm(not train)(nn.Dense(6, False)(x))
        x = nn.Dropout(0.3)(x, not train)
        return nn.GroupNorm(3)(x) + nn.RMSNorm()(x)


class General(nn.Module):
    """Projections over several axes."""

    heads: int = 2

    @nn.compact
    def __call__(self, x):
        y = nn.DenseGeneral(features=(self.heads, 3), name="query")(x)
        return nn.DenseGeneral(features=x.shape[-1], axis=(-2, -1), name="out")(y)


class Zoo(nn.Module):
    """Everything above as one program."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = Inherited()(x)
        heads = Stack()(x)
        x = jnp.concatenate([x, heads["a"], heads["b"]], axis=-1)
        x = Both()(Conditional()(x))
        x = Statistics()(x, train=train)
        x = Shared()(x)
        x = ModeParent()(x, train=train)
        x = Normed(name="normed")(x, train=train)
        x = General()(x)
        return Wrapped()(x[:, None, :].repeat(3, axis=1))


def head(x, size):
    """A function that makes a layer."""
    return nn.Dense(size, name="head")(x)


class WithFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        return head(nn.relu(nn.Dense(4)(x)), 3)


class WithInnerFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        def layer(y, size):
            return nn.relu(nn.Dense(size)(y))

        return layer(layer(x, 4), 3)


class Outer(nn.Module):
    """A module as a field."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self.inner(x))


class MakesOuter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Outer(inner=CompactChild(4))(x)


def make_outer():
    return Outer(inner=CompactChild(4))


class Rematted(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        block = nn.remat(CompactChild)
        for i in range(self.depth):
            x = block(4, name=f"block_{i}")(x)
        return x


class ScanBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(self.width)(nn.tanh(x)), None


class Scanned(nn.Module):
    depth: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        layers = nn.scan(
            ScanBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
        )
        x, _ = layers(4, name="layers")(x, None)
        return x


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            CompactChild,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=2,
        )
        return members(3)(x)


class Lifted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Ensemble()(Scanned()(Rematted()(x)))


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(4, kernel_init=init)(x)
        w = self.param("w", nn.with_partitioning(nn.initializers.normal(), ("model",)), (4,))
        return x * w


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        if train:
            x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
        return nn.Dense(2)(x)


PartialConv = functools.partial(nn.Conv, kernel_size=(3,), padding="SAME")


class Partials(nn.Module):
    conv: Any = PartialConv

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, 4, use_bias=False)
        x = self.conv(features=5)(x)
        x = self.conv(6)(nn.relu(x))
        return dense()(dense(name="second")(x))


class Projecting(nn.Module):
    """A condition on shapes that has a name."""

    width: int
    scale: int = 1

    @nn.compact
    def __call__(self, x):
        needs = x.shape[-1] != 2 * self.width or self.scale != 1
        residual = x
        if needs:
            residual = nn.Dense(2 * self.width, name="proj")(residual) * self.scale
        return residual + nn.Dense(2 * self.width)(nn.relu(nn.Dense(self.width)(x)))


class Doubling(nn.Module):
    """A loop that changes what a constructor was given, behind it."""

    depth: int = 3

    @nn.compact
    def __call__(self, x):
        width = 2
        for _ in range(self.depth):
            x = nn.Dense(width)(x)
            width *= 2
        return x


class Choosing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Projecting(2, 3)(Projecting(2)(Projecting(2)(x)))
        return Doubling()(x)
