"""Models with transforms of functions that stay Linen; as in `models_left`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
SHARED = {"variable_broadcast": "params", "length": 2}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.Dense(3)(x))


class SameMasks(nn.Module):
    """nn.scan of layers that start alike and draw other keys"""

    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": True}
        scan = nn.scan(lambda m, x, _: (m(x), None), **{**STACKED, "split_rngs": keys})
        return scan(Dropped(), x, None)[0]


class OtherMasks(nn.Module):
    """nn.scan of layers that draw the same keys"""

    @nn.compact
    def __call__(self, x):
        keys = {"params": True, "dropout": False}
        scan = nn.scan(lambda m, x, _: (m(x), None), **{**STACKED, "split_rngs": keys})
        return scan(Dropped(), x, None)[0]


class SameMaskInTurns(nn.Module):
    """nn.scan of one layer that draws the same keys in each turn"""

    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": False}
        scan = nn.scan(lambda m, x, _: (m(x), None), **SHARED, split_rngs=keys)
        return scan(Dropped(), x, None)[0]


class OtherMasksMapped(nn.Module):
    """nn.vmap of one layer that draws other keys in each turn"""

    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": True}
        return nn.vmap(lambda m, x: m(x), variable_axes={"params": None}, split_rngs=keys)(
            Dropped(), x
        )


class ByPosition(nn.Module):
    """nn.remat with options by position"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), True)(nn.Dense(3), x)


class Filtered(nn.Module):
    """nn.remat with variables"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), variables="params")(nn.Dense(3), x)


class WithDefault(nn.Module):
    """nn.remat of a function with defaults"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x, scale=2.0: m(x) * scale)(nn.Dense(3), x)


class OtherMetadata(nn.Module):
    """nn.scan with other metadata"""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(lambda m, x, _: (m(x), None), **STACKED, metadata_params={"axis": 1})
        return scan(nn.Dense(3), x, None)[0]


class NestedAxes(nn.Module):
    """nn.scan with in_axes="""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda m, x, given: (m(x) + given["a"], None), **STACKED, in_axes=({"a": 0},)
        )
        return scan(nn.Dense(3), x, {"a": jnp.ones((2, 3))})[0]


class StacksField(nn.Module):
    """nn.scan of a layer that another class makes"""

    inner: Any

    @nn.compact
    def __call__(self, x):
        return nn.scan(lambda m, x, _: (m(x), None), **STACKED)(self.inner, x, None)[0]


class MakesField(nn.Module):
    @nn.compact
    def __call__(self, x):
        return StacksField(nn.Dense(3))(x)


class WithLinenInside(nn.Module):
    """a transform around what stays Linen"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x))(nn.ConvLocal(3, (1,)), x)


class BranchesByName(nn.Module):
    """nn.cond with keywords"""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return nn.cond(x.sum() > 0, lambda m, x: x, lambda m, x: -x, self, x, rngs=True)
