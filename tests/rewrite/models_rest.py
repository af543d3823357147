"""Layers that are given `**` arguments."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

NO_BIAS = {"use_bias": False}


class Hidden(nn.Module):
    """Dicts of the method, of a field and of the file."""

    options: Any

    @nn.compact
    def __call__(self, x):
        inits = {
            "kernel_init": nn.initializers.xavier_uniform(),
            "bias_init": nn.initializers.normal(1e-6),
        }
        d = x.shape[-1]
        x = nn.Dense(2 * d, **inits)(x)
        x = nn.LayerNorm(**self.options)(x)
        return nn.Dense(d, **inits)(nn.Dense(5, **NO_BIAS)(x))


class Model(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        return Hidden({"use_scale": False})(nn.Dense(self.width)(x))


class Changed(nn.Module):
    """The second layer gets another dict than the first one, by the same name."""

    @nn.compact
    def __call__(self, x):
        given = {"use_bias": False}
        x = nn.Dense(3, **given)(x)
        given["use_bias"] = True
        return nn.Dense(4, **given)(x)


class Named(nn.Module):
    """What NNX calls otherwise, or is told in the call."""

    options: Any
    modes: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(**self.modes)(nn.Dense(**self.options)(x))


def make_named():
    return Named({"features": 3, "use_bias": False}, {"rate": 0.5, "deterministic": True})


def make_head(size, use_bias=True):
    return nn.Dense(size, use_bias=use_bias, name="head")


class Starred(nn.Module):
    """A function that makes a layer, given what the rewriter cannot tell apart."""

    options: Any

    @nn.compact
    def __call__(self, x):
        return make_head(**self.options)(x)


class Functions(nn.Module):
    """The same function, also called with what can be told."""

    @nn.compact
    def __call__(self, x):
        return make_head(3)(Starred({"size": 5})(x))


@jax.tree_util.register_pytree_node_class
class Normal:
    """What has no `repr` of its own."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale

    def tree_flatten(self):
        return (self.loc, self.scale), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


class Policy(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        return Normal(nn.Dense(self.width)(x), nn.softplus(nn.Dense(self.width)(x)))


@jax.tree_util.register_pytree_node_class
class Labelled:
    """An array whose last axis has as many names, and that no other array has."""

    def __init__(self, array: Any, names: tuple[str, ...]) -> None:
        if hasattr(array, "shape") and array.shape[-1] != len(names):
            raise ValueError(f"{array.shape} has not {len(names)} names")
        self.array, self.names = array, names

    def tree_flatten(self):
        return (self.array,), self.names

    @classmethod
    def tree_unflatten(cls, names, leaves):
        return cls(*leaves, names)


class OfLabelled(nn.Module):
    """A call of an array with names, and a comprehension with a variable of an inner function."""

    @nn.compact
    def __call__(self, x):
        size = 2

        def double():
            return size * 2

        factors = [
            size + 1
            for size in [
                2,
            ]
        ]
        return nn.Dense(3)(x.array) * factors[0] * double()
