"""Models that stay Linen for what constructors and transforms are given; as in `models_left`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning

import tests.rewrite.models_elsewhere
from tests.rewrite import models_elsewhere


class StarOfPartial(nn.Module):
    """a constructor is given * arguments"""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        return dense(*(3,))(x)


class NeedsResult(nn.Module):
    """a constructor needs the result of a layer"""

    def start(self, x):
        return nn.initializers.ones

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=self.start(x))(x)


class OfOtherFile(nn.Module):
    """a function makes a layer of it: it is in another file"""

    @nn.compact
    def __call__(self, x):
        return tests.rewrite.models_elsewhere.head(x, 3)


class Borrows(nn.Module):
    """a function makes a layer of it: it is in another file"""

    @nn.compact
    def __call__(self, x):
        return tests.rewrite.models_elsewhere.borrowed(self, x)


class BorrowsOfClass(nn.Module):
    """a function outside of the class makes a module of it"""

    @nn.compact
    def __call__(self, x):
        return models_elsewhere.Lent.lent(self, x)


def scaled_by(param, size):
    return param("scale", nn.initializers.ones, (size,))


class HandsOn(nn.Module):
    """self.param is handed on"""

    @nn.compact
    def __call__(self, x):
        return x * scaled_by(self.param, x.shape[-1])


class OfModule(nn.Module):
    """a parameter of a module that is given as an argument"""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        return x * partitioning.param_with_axes("scale", init, (3,), axes=("a",), module=self)


# A function of another package, which declares a parameter of the module that it is given.
ELSEWHERE: dict[str, Any] = {}
TEXT = "def declared(module, start):\n    return module.param('scale', start, (3,))\n"
exec(compile(TEXT, "elsewhere.py", "exec"), ELSEWHERE)


class Declared(nn.Module):
    """declared of another package makes a parameter of it"""

    start: Callable[..., Any] = nn.initializers.ones

    @nn.compact
    def __call__(self, x):
        return x * ELSEWHERE["declared"](self, self.start)


class AxisOfCall(nn.Module):
    """an axis that setup does not know"""

    axis: int = 1

    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x):
        mapped = nn.vmap(
            lambda layer, x: layer(x),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
        )
        return mapped(self.layer, x)


class KeywordMapped(nn.Module):
    """nn.vmap with keywords in the call"""

    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            lambda layer, x, scale=1.0: layer(x) * scale,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return mapped(nn.Dense(3), x, scale=2.0)


def fitted(x, size):
    if x.shape[-1] != size:
        x = nn.Dense(size)(x)
    return x


class Fitted(nn.Module):
    """a function makes a layer of it: a condition that was not seen"""

    @nn.compact
    def __call__(self, x):
        return fitted(fitted(x, 5), 3)


class ComputedForLayer(nn.Module):
    """a layer is given what setup computes"""

    def setup(self):
        scale = 2 * self.param("scale", nn.initializers.ones, (3,))
        self.dense = nn.Dense(3, bias_init=lambda key, shape, dtype: jnp.ones(shape) * scale)

    def __call__(self, x):
        return self.dense(x)


class ComputedForParameter(nn.Module):
    """a parameter is initialised with a variable that setup computes from parameters"""

    def setup(self):
        half = self.param("scale", nn.initializers.ones, (3,)) / 2
        self.shift = self.param("shift", lambda key, value: value, half)

    def __call__(self, x):
        return x + self.shift


class ComputedAgain(nn.Module):
    """setup reads self.scale before it sets it again"""

    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (3,))
        self.half = self.scale / 2
        self.scale = 2 * self.scale

    def __call__(self, x):
        return x * self.scale + self.half


class ComputedInBlock(nn.Module):
    """setup computes with parameters in a block"""

    def setup(self):
        scale = self.param("scale", nn.initializers.ones, (3,))
        for factor in (1, 2):
            self.scale = factor * scale

    def __call__(self, x):
        return x * self.scale


class ComputedName(nn.Module):
    """setup has a variable named as an attribute"""

    doubles: bool = True

    def setup(self):
        scale = self.param("w", nn.initializers.ones, (3,))
        if self.doubles:
            self.scale = 2 * scale
        else:
            self.scale = 3 * scale

    def __call__(self, x):
        return x * self.scale
