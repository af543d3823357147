"""Programs whose functions make layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


def block(x, size, act=nn.relu):
    """A layer with its activation."""
    # Wide first.
    x = nn.Dense(size)(x)
    return act(x)


class Applied(nn.Module):
    sizes: Sequence[int] = (5, 6)

    @nn.compact
    def __call__(self, x):
        for size in self.sizes:
            x = block(x, size)
        return nn.Dense(2)(block(block(x, 4), act=nn.tanh, size=3))


def gated(x, train, *, width):
    y = nn.BatchNorm(use_running_average=not train)(nn.Dense(width)(x))
    gate = gate_of(x, width)
    scale = scaling(y)
    return nn.Dropout(0.5)(y * gate * scale, deterministic=not train)


def gate_of(x, width):
    return nn.sigmoid(nn.Dense(width, name="gate")(x))


def scaling(x):
    return jnp.mean(x)


class Gated(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool = False):
        return gated(x, train, width=self.width)


def stack(sizes, use_bias=True):
    return [nn.Dense(size, use_bias=use_bias) for size in sizes]


def sequence(sizes):
    layers = []
    for size in sizes:
        layers += [nn.Dense(size), nn.relu]
    return nn.Sequential(layers)


def heads(names):
    return {name: nn.Dense(2) for name in names}


def dense(size, name=None, **options):
    return nn.Dense(size, kernel_init=nn.initializers.orthogonal(2.0), name=name, **options)


class Stacks(nn.Module):
    sizes: Sequence[int] = (5, 6)

    def setup(self):
        self.layers = stack(self.sizes)
        self.net = sequence(self.sizes)
        self.heads = heads(("a", "b"))
        self.last = dense(3)

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        x = self.net(x)
        return self.last(self.heads["a"](x) + self.heads["b"](x))


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        for layer in stack((4, 5), use_bias=False):
            x = nn.relu(layer(x))
        x = nn.relu(dense(6, use_bias=False)(x))
        return dense(2, name="out")(x)


def norm_of(kind: str, **options):
    if kind == "layer":
        return nn.LayerNorm(**options)
    if kind == "rms":
        return nn.RMSNorm(**options)
    raise ValueError(kind)


class Named(nn.Module):
    kind: str = "layer"

    @nn.compact
    def __call__(self, x):
        x = norm_of(self.kind)(nn.Dense(4)(x))
        return nn.Dense(3)(norm_of(self.kind, epsilon=1e-3)(x))


class Both(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Named("layer")(x) + Named("rms")(x)


class Inner(nn.Module):
    dtype: Any
    norm: Any
    act: Callable

    @nn.compact
    def __call__(self, x):
        return self.act(self.norm()(nn.Dense(x.shape[-1], dtype=self.dtype)(x)))


class Middle(nn.Module):
    inner: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + self.inner(norm=self.norm)(x)
        return self.norm(name="last")(x)


class ThreeLevels(nn.Module):
    """What makes layers is handed down through two classes."""

    dtype: Any = jnp.float32
    act: Callable = nn.gelu

    @nn.compact
    def __call__(self, x, train: bool = False):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=self.dtype)
        inner = functools.partial(Inner, dtype=self.dtype, act=self.act)
        middle = functools.partial(Middle, inner=inner)
        return middle(norm=norm, name="second")(middle(norm=norm)(nn.Dense(4)(x)))
