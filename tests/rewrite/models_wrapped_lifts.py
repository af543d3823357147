"""Classes that are rewritten around a lifted layer that stays Linen, and says why."""

from __future__ import annotations

from flax import linen as nn

from tests.rewrite import models_elsewhere


class Step(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(x)


def maybe(cls, flag):
    return {True: nn.remat(cls), False: cls}[flag]


class Maybe(nn.Module):
    """the condition of a transform was not found"""

    @nn.compact
    def __call__(self, x):
        for flag in (True, False):
            x = maybe(Step, flag)()(x)
        return x


class OfKinds(nn.Module):
    """the lifted transforms are not always the same"""

    @nn.compact
    def __call__(self, x):
        for cls in (nn.remat(Step), nn.jit(Step)):
            x = cls()(x)
        return x


class Sometimes(nn.Module):
    """the layers are only sometimes stacked"""

    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        many = nn.vmap(nn.remat(Step), **axes)
        for cls in (many, Step):
            x = cls()(x)
        return x


class WithoutName(nn.Module):
    """this file has no name for Unnamed"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(models_elsewhere.unnamed())()(x)
