"""Classes that are rewritten around a lifted layer that stays Linen, and says why."""

from __future__ import annotations

import jax
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


class Unseen(nn.Module):
    """no run used nn.remat(Step)"""

    @nn.compact
    def __call__(self, x):
        step = nn.remat(Step) if jax.process_count() > 99 else Step
        return step()(x)


class OfOptions(nn.Module):
    """the lifted transforms are not always the same"""

    remat: str = "none"

    @nn.compact
    def __call__(self, x):
        step = Step
        if self.remat == "full":
            step = nn.remat(Step)
        elif self.remat == "some":
            step = nn.remat(Step, policy=jax.checkpoint_policies.dots_saveable)
        return step()(x)


class OfTable(nn.Module):
    """the condition of a transform was not found"""

    remat: str = "none"

    @nn.compact
    def __call__(self, x):
        return {"full": nn.remat(Step), "none": Step}[self.remat]()(x)
