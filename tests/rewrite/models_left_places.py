"""Models that make layers where no constructor can; as in `models_left`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.rewrite.models_left import WhileLoop

SHARED = nn.Dense(3)


def same(function):
    return function


def called(layer, *given):
    return layer(*given)


class Maker:
    def __call__(self, x):
        return nn.Dense(3)(x)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class MadeByObject(nn.Module):
    """a function outside of the class makes a layer of it"""

    @nn.compact
    def __call__(self, x):
        return Maker()(x)


class MadeByModule(nn.Module):
    """a module is made outside of the class: SHARED"""

    def setup(self):
        self.layer = SHARED

    def __call__(self, x):
        return self.layer(x)


class OfTwoLevels(nn.Module):
    """one expression makes classes that are rewritten and classes that are not"""

    @nn.compact
    def __call__(self, x):
        for cls in (Plain, WhileLoop):
            x = cls()(x)
        return x


class UnrunExpression(nn.Module):
    """a layer in an expression that did not run"""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return nn.Dense(8)(x) if x.ndim == 7 else x


class UnrunLambda(nn.Module):
    """a layer in a statement that did not run"""

    @nn.compact
    def __call__(self, x):
        wide = lambda x: 2 * nn.Dense(8)(x)  # noqa: E731
        return wide(x) if x.ndim == 7 else nn.Dense(3)(x)


class OverInputs(nn.Module):
    """a loop over what only the call knows makes layers"""

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(3, name=f"layer_{i}") for i, _ in enumerate(jnp.split(x, 2))]
        return sum(layer(x) for layer in layers)


class NormElsewhere(nn.Module):
    """a mode moves to a call that is not found"""

    @nn.compact
    def __call__(self, x, train=False):
        return called(nn.BatchNorm(use_running_average=not train), x)


class NormInOther(nn.Module):
    """a mode is handed on to another method"""

    norm: Any

    @nn.compact
    def encode(self, x):
        return self.norm()(x)

    def __call__(self, x):
        return self.encode(x)


class MakesNormInOther(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return NormInOther(functools.partial(nn.BatchNorm, use_running_average=not train))(x)


class NormInRest(nn.Module):
    """a mode is handed on to a method with ** arguments"""

    norm: Any

    @nn.compact
    def __call__(self, x, **rest):
        return self.norm()(x)


class MakesNormInRest(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return NormInRest(functools.partial(nn.BatchNorm, use_running_average=not train))(x)


class ReadsMode(nn.Module):
    """self.deterministic is told in the call, and rate reads it"""

    deterministic: bool

    def rate(self):
        return 0.0 if self.deterministic else 0.5

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(self.rate(), deterministic=True)(nn.Dense(3)(x))


class MakesReadsMode(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return ReadsMode(deterministic=not train)(x)


class ModeFirst(nn.Module):
    deterministic: bool
    size: int

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(self.size)(x))


class ModeByPosition(nn.Module):
    """a mode is given by position before other arguments"""

    @nn.compact
    def __call__(self, x, train=False):
        return ModeFirst(not train, 3)(x)


class LayerInTraining(nn.Module):
    """an argument of the call decides which layers exist, and it was not always the same"""

    @nn.compact
    def __call__(self, x, wide):
        if wide:
            x = nn.Dense(3)(x)
        return x


class MakesLayerInTraining(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return LayerInTraining()(LayerInTraining()(x, True), train)


class SizeOfMode(nn.Module):
    """a constructor needs self.deterministic, which is told in the call"""

    deterministic: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=nn.initializers.constant(float(self.deterministic)))(x)


class MakesSizeOfMode(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return SizeOfMode(deterministic=not train)(x)


class SeveralDtypes(nn.Module):
    """decode caches of several dtypes"""

    @nn.compact
    def __call__(self, x):
        for dtype in (jnp.float32, jnp.bfloat16):
            x = nn.MultiHeadDotProductAttention(2, qkv_features=4, dtype=dtype, decode=True)(x)
        return x


class CarryWithScale(nn.RNNCellBase):
    """an initialize_carry with other arguments"""

    def initialize_carry(self, rng, input_shape, scale=0.0):
        return jnp.full((*input_shape[:-1], 3), scale)

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(3)(x) + carry)
        return carry, carry

    @property
    def num_feature_axes(self):
        return 1


class MakesCarryWithScale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(CarryWithScale())(x)


class CallsByStar(nn.Dense):
    """nnx.Linear is called in another way"""

    def __call__(self, *given):
        return super().__call__(*given)


class MakesCallsByStar(nn.Module):
    @nn.compact
    def __call__(self, x):
        return CallsByStar(3)(x)


class DefaultByFunction(nn.Dense):
    """a layer of Flax with a default that a function makes"""

    tags: dict[str, int] = dataclasses.field(default_factory=dict)


class MakesDefaultByFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        return DefaultByFunction(3)(x)


class JitStatic(nn.Module):
    """a method under jax.jit"""

    @staticmethod
    @jax.jit
    def double(x):
        return 2 * x

    @nn.compact
    def __call__(self, x):
        return self.double(nn.Dense(3)(x))
