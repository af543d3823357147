"""A stack of blocks whose classes have one body on Linen's base class and on `bridge.Module`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge

WIDTH = 64
# As in Linen's own layers, where it is the default of a field.
KERNEL_INIT = nn.initializers.lecun_normal()


def _norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


@functools.cache
def stack_on(library: Any) -> Any:
    """The class of the stack on the base class of `flax.linen`, `bridge` or `flax.nnx.bridge`."""

    class Dense(library.Module):
        features: int

        @library.compact
        def __call__(self, x):
            shape = x.shape[-1], self.features
            kernel = jnp.asarray(self.param("kernel", KERNEL_INIT, shape))
            bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
            return jnp.dot(x, kernel) + jnp.asarray(bias)

    class Norm(library.Module):
        @library.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
            return _norm(x, jnp.asarray(scale))

    class Block(library.Module):
        @library.compact
        def __call__(self, x):
            x = nn.gelu(Dense(WIDTH, name="up")(Norm(name="norm")(x)))
            return Dense(WIDTH, name="down")(x)

    class Stack(library.Module):
        blocks: int

        @library.compact
        def __call__(self, x):
            for i in range(self.blocks):
                x = Block(name=f"block_{i}")(x)
            return x

    return Stack


class NativeBlock(nnx.Module):
    """The same block in NNX."""

    def __init__(self, variables: Any):
        self.scale = nnx.Param(variables["norm"]["scale"])
        self.kernels = nnx.List([nnx.Param(variables[n]["kernel"]) for n in ("up", "down")])
        self.biases = nnx.List([nnx.Param(variables[n]["bias"]) for n in ("up", "down")])

    def __call__(self, x):
        """Applies the block."""
        x = _norm(x, self.scale[...])
        x = nn.gelu(jnp.dot(x, self.kernels[0][...]) + self.biases[0][...])
        return jnp.dot(x, self.kernels[1][...]) + self.biases[1][...]


class NativeStack(nnx.Module):
    """The same stack in NNX."""

    def __init__(self, variables: Any):
        self.blocks = nnx.List([NativeBlock(variables[name]) for name in sorted(variables)])

    def __call__(self, x):
        """Applies the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class StyleCase:
    """The stack in every form, on the same weights.

    Attributes:
      blocks: how many blocks there are.
    """

    blocks: int

    def module(self, library: Any) -> Any:
        """The module on the base class of a library."""
        return stack_on(library)(self.blocks)

    @functools.cached_property
    def x(self) -> jax.Array:
        """The input."""
        return jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)), jnp.float32)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """The variables of the Linen class, which fit the others."""
        return self.module(nn).init(jax.random.key(0), self.x)

    def applying(self, library: Any) -> tuple[Any, ...]:
        """`apply` and its arguments."""
        return self.module(library).apply, self.variables, self.x

    def kept(self) -> tuple[Any, ...]:
        """A `bridge.Module` that keeps its variables, and its argument."""
        model = self.module(bridge).bind(self.variables)
        model(self.x)
        return model, self.x

    def native(self) -> tuple[Any, ...]:
        """The native NNX model, and its argument."""
        return NativeStack(self.variables["params"]), self.x


APPLIED = {"Linen": nn, "bridge.Module": bridge, "flax bridge.Module": flax_bridge}
