"""The models that are measured: the same one in Linen and in NNX, wrapped both ways."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge

WIDTH = 64
VIT = "ViT-S/16"


class LinenBlock(nn.Module):
    """LayerNorm, Dense, gelu, Dense."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(x)
        x = nn.gelu(nn.Dense(WIDTH, name="up")(x))
        return nn.Dense(WIDTH, name="down")(x)


class LinenStack(nn.Module):
    """Blocks behind each other."""

    blocks: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.blocks):
            x = LinenBlock(name=f"block_{i}")(x)
        return x


class NNXBlock(nnx.Module):
    """LayerNorm, Linear, gelu, Linear."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(self.norm(x))))


class NNXStack(nnx.Module):
    """Blocks behind each other."""

    def __init__(self, blocks: int, *, rngs: nnx.Rngs):
        self.blocks = blocks
        for i in range(blocks):
            setattr(self, f"block_{i}", NNXBlock(rngs=rngs))

    def __call__(self, x):
        for i in range(self.blocks):
            x = getattr(self, f"block_{i}")(x)
        return x


@dataclasses.dataclass(frozen=True)
class ViTShape:
    """The sizes of a vision transformer; the defaults are those of ViT-S/16."""

    layers: int = 12
    width: int = 384
    heads: int = 6
    patch: int = 16
    image: int = 224
    classes: int = 1000


class LinenEncoderLayer(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and around a residual."""

    shape: ViTShape

    @nn.compact
    def __call__(self, x):
        shape = self.shape
        attention = nn.MultiHeadDotProductAttention(shape.heads, name="attention")
        x = x + attention(nn.LayerNorm(name="norm_1")(x))
        y = nn.gelu(nn.Dense(4 * shape.width, name="up")(nn.LayerNorm(name="norm_2")(x)))
        return x + nn.Dense(shape.width, name="down")(y)


class LinenViT(nn.Module):
    """A vision transformer whose head reads the mean of the tokens."""

    shape: ViTShape

    @nn.compact
    def __call__(self, images):
        shape = self.shape
        patch = (shape.patch, shape.patch)
        x = nn.Conv(shape.width, patch, patch, "VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, shape.width)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (1, x.shape[1], shape.width))
        for i in range(shape.layers):
            x = LinenEncoderLayer(shape, name=f"layer_{i}")(x)
        return nn.Dense(shape.classes, name="head")(nn.LayerNorm(name="norm")(x).mean(axis=1))


class NNXEncoderLayer(nnx.Module):
    """The NNX twin of `LinenEncoderLayer`."""

    def __init__(self, shape: ViTShape, *, rngs: nnx.Rngs):
        width = shape.width
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(shape.heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NNXViT(nnx.Module):
    """The NNX twin of `LinenViT`."""

    def __init__(self, shape: ViTShape, *, rngs: nnx.Rngs):
        patch = (shape.patch, shape.patch)
        tokens = (shape.image // shape.patch) ** 2
        self.shape = shape
        self.patches = nnx.Conv(3, shape.width, patch, patch, padding="VALID", rngs=rngs)
        values = nnx.initializers.normal(0.02)(rngs.params(), (1, tokens, shape.width))
        self.positions = nnx.Param(values)
        for i in range(shape.layers):
            setattr(self, f"layer_{i}", NNXEncoderLayer(shape, rngs=rngs))
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs)
        self.head = nnx.Linear(shape.width, shape.classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, self.shape.width) + self.positions[...]
        for i in range(self.shape.layers):
            x = getattr(self, f"layer_{i}")(x)
        return self.head(self.norm(x).mean(axis=1))


@dataclasses.dataclass(frozen=True)
class Case:
    """One model in every form that is measured, all of them on the same weights.

    What takes time to make is made when it is first asked for.

    Attributes:
      linen: the Linen module.
      nnx_class: the NNX module's class.
      argument: the positional argument of its constructor.
      input_shape: the shape of the float32 input.
    """

    linen: nn.Module
    nnx_class: Callable[..., nnx.Module]
    argument: Any
    input_shape: tuple[int, ...]

    @functools.cached_property
    def x(self) -> jax.Array:
        """The input."""
        values = np.random.default_rng(0).normal(size=self.input_shape)
        return jnp.asarray(values, jnp.float32)

    @functools.cached_property
    def key(self) -> jax.Array:
        """The key of initialisation."""
        return jax.random.key(0)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """The Linen variables; every other form gets these arrays."""
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(self.linen.init, self.key, self.x)
        return jax.tree.map(
            lambda a: jnp.asarray(rng.normal(scale=0.05, size=a.shape), a.dtype), shapes
        )

    def construct(self, rngs: nnx.Rngs) -> Any:
        """The native NNX model with initial values of its own."""
        return self.nnx_class(self.argument, rngs=rngs)

    @functools.cached_property
    def nnx_split(self) -> tuple[Any, Any]:
        """GraphDef and State of the native NNX model."""
        # Not abstractly: the time that an NNX constructor takes in a trace grows with its square.
        graphdef, state = nnx.split(self.construct(nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, self.variables["params"])
        return graphdef, state

    @functools.cached_property
    def nnx(self) -> Any:
        """The native NNX model."""
        return nnx.merge(*self.nnx_split)

    @functools.cached_property
    def to_linen(self) -> Any:
        """The NNX model as a Linen module, by this package."""
        return bridge.to_linen(self.nnx_class, self.argument)

    @functools.cached_property
    def to_linen_variables(self) -> dict[str, Any]:
        """Its variables, with collection `nnx`."""
        return self._with_weights(self.to_linen)

    @functools.cached_property
    def flax_to_linen(self) -> Any:
        """The NNX model as a Linen module, by `flax.nnx.bridge`."""
        return flax_bridge.to_linen(self.nnx_class, self.argument)

    @functools.cached_property
    def flax_to_linen_variables(self) -> dict[str, Any]:
        """Its variables, with collection `nnx`."""
        return self._with_weights(self.flax_to_linen)

    def _with_weights(self, wrapper: nn.Module) -> dict[str, Any]:
        return {**wrapper.init(self.key, self.x), "params": self.variables["params"]}

    @functools.cached_property
    def to_nnx(self) -> Any:
        """The Linen module as an NNX model, by this package."""
        return bridge.ToNNX.from_variables(self.linen, self.variables)

    @functools.cached_property
    def flax_to_nnx(self) -> Any:
        """The Linen module as an NNX model, by `flax.nnx.bridge`, which takes no variables."""
        model = flax_bridge.ToNNX(self.linen, rngs=nnx.Rngs(0))
        for name, value in flax_bridge.variables.linen_vars_to_nnx_attrs(self.variables).items():
            setattr(model, name, nnx.data(value))
        return model


def stack(blocks: int) -> Case:
    """A stack of blocks of width 64 on 4 rows."""
    return Case(LinenStack(blocks), NNXStack, blocks, (4, WIDTH))


def vit(shape: ViTShape | None = None) -> Case:
    """A vision transformer on one image, ViT-S/16 by default."""
    shape = shape or ViTShape()
    return Case(LinenViT(shape), NNXViT, shape, (1, shape.image, shape.image, 3))


def case_of(size: int | str) -> Case:
    """The model of a size as rows name it: a number of blocks, or `VIT`."""
    return vit() if size == VIT else stack(int(size))
