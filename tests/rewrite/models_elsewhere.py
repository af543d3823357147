"""Functions and a class that models of another file use."""

from __future__ import annotations

from flax import linen as nn


def borrowed(self, x):
    return nn.Dense(3)(x)


class Lent:
    def lent(self, x):
        return nn.Dense(3)(x)


def head(x, size):
    return nn.Dense(size)(x)


class Unnamed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(x)


def unnamed():
    return Unnamed
