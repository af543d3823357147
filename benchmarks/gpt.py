"""A decoder of tokens in Linen and in NNX, for training and for decoding with a cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from .models import Case


@dataclasses.dataclass(frozen=True)
class GPTShape:
    """The sizes of a decoder.

    Attributes:
      layers: how many blocks there are.
      width: features of a token.
      heads: of the attention.
      vocabulary: how many tokens there are.
      length: tokens of a sequence.
      dtype: of parameters and computation.
      decode: whether a call takes one token and keeps keys and values in a cache.
    """

    layers: int = 12
    width: int = 256
    heads: int = 4
    vocabulary: int = 1024
    length: int = 128
    dtype: Any = jnp.float32
    decode: bool = False

    def options(self) -> dict[str, Any]:
        """What every layer is told."""
        return {"dtype": self.dtype, "param_dtype": self.dtype}

    def mask(self, x: Any) -> Any:
        """The mask of a sequence; the cache makes its own."""
        return None if self.decode else nn.make_causal_mask(x[..., 0])


class LinenDecoderLayer(nn.Module):
    """Attention to what came before and a perceptron, each behind a LayerNorm."""

    shape: GPTShape

    @nn.compact
    def __call__(self, x):
        shape, options = self.shape, self.shape.options()
        attention = nn.MultiHeadDotProductAttention(
            shape.heads, decode=shape.decode, name="attention", **options
        )
        x = x + attention(nn.LayerNorm(name="norm_1", **options)(x), mask=shape.mask(x))
        y = nn.LayerNorm(name="norm_2", **options)(x)
        y = nn.gelu(nn.Dense(4 * shape.width, name="up", **options)(y))
        return x + nn.Dense(shape.width, name="down", **options)(y)


class LinenGPT(nn.Module):
    """Tokens to logits of the next ones."""

    shape: GPTShape

    @nn.compact
    def __call__(self, tokens, position=0):
        shape, options = self.shape, self.shape.options()
        x = nn.Embed(shape.vocabulary, shape.width, name="tokens", **options)(tokens)
        places = nn.Embed(shape.length, shape.width, name="positions", **options)
        x = x + places(position + jnp.arange(tokens.shape[-1]))[None]
        for i in range(shape.layers):
            x = LinenDecoderLayer(shape, name=f"layer_{i}")(x)
        x = nn.LayerNorm(name="norm", **options)(x)
        return nn.Dense(shape.vocabulary, name="head", **options)(x)


class NNXDecoderLayer(nnx.Module):
    """The NNX twin of `LinenDecoderLayer`."""

    def __init__(self, shape: GPTShape, *, rngs: nnx.Rngs):
        width, options = shape.width, shape.options()
        self.shape = shape
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs, **options)
        self.attention = nnx.MultiHeadAttention(
            shape.heads, width, decode=shape.decode, rngs=rngs, **options
        )
        if shape.decode:
            self.attention.init_cache((1, shape.length, width), dtype=shape.dtype)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs, **options)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, **options)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, **options)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), mask=self.shape.mask(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NNXGPT(nnx.Module):
    """The NNX twin of `LinenGPT`."""

    def __init__(self, shape: GPTShape, *, rngs: nnx.Rngs):
        options = shape.options()
        self.shape = shape
        self.tokens = nnx.Embed(shape.vocabulary, shape.width, rngs=rngs, **options)
        self.positions = nnx.Embed(shape.length, shape.width, rngs=rngs, **options)
        for i in range(shape.layers):
            setattr(self, f"layer_{i}", NNXDecoderLayer(shape, rngs=rngs))
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs, **options)
        self.head = nnx.Linear(shape.width, shape.vocabulary, rngs=rngs, **options)

    def __call__(self, tokens, position=0):
        x = self.tokens(tokens)
        x = x + self.positions(position + jnp.arange(tokens.shape[-1]))[None]
        for i in range(self.shape.layers):
            x = getattr(self, f"layer_{i}")(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class GPTCase(Case):
    """The decoder in every form, on the same weights."""

    @functools.cached_property
    def x(self) -> jax.Array:
        """The tokens."""
        return self._tokens(self.input_shape)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """The Linen variables; the cache is made for the whole sequence."""
        rng = np.random.default_rng(1)
        whole = self._tokens((1, self.argument.length))
        shapes = jax.eval_shape(self.linen.init, self.key, whole)
        params = jax.tree.map(
            lambda a: jnp.asarray(rng.normal(scale=0.05, size=a.shape), a.dtype), shapes["params"]
        )
        rest = {name: tree for name, tree in shapes.items() if name != "params"}
        return {"params": params, **jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rest)}

    def _tokens(self, shape: tuple[int, ...]) -> jax.Array:
        tokens = np.random.default_rng(0).integers(self.argument.vocabulary, size=shape)
        return jnp.asarray(tokens, jnp.int32)


def gpt(shape: GPTShape | None = None) -> GPTCase:
    """A decoder on one sequence, or on one token if it decodes."""
    shape = shape or GPTShape()
    length = 1 if shape.decode else shape.length
    return GPTCase(LinenGPT(shape), NNXGPT, shape, (1, length))
