"""Models that decode one token at a time, with Flax's cache and with caches of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class Positions(nn.Module):
    """Positions that count the steps."""

    length: int
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(0.1), (1, self.length, x.shape[-1]))
        found = table[:, : x.shape[1], :]
        if self.decode:
            is_initialized = self.has_variable("cache", "index")
            index = self.variable("cache", "index", lambda: jnp.array(0, dtype=jnp.uint32))
            if is_initialized:
                i = index.value
                index.value = i + 1
                found = jax.lax.dynamic_slice(table, jnp.array((0, i, 0)), (1, 1, x.shape[-1]))
        return x + found


class CompactLayer(nn.Module):
    heads: int = 2
    decode: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.heads, decode=self.decode, deterministic=True, name="attention"
        )(y, y, mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.relu(y))


class SetupLayer(nn.Module):
    heads: int = 2
    decode: bool = False

    def setup(self):
        self.norm = nn.LayerNorm()
        self.attention = nn.MultiHeadDotProductAttention(self.heads, decode=self.decode)

    def __call__(self, x, mask=None):
        return x + self.attention(self.norm(x), mask=mask)


class OwnCache(nn.Module):
    """Attention with a single head, whose cache is its own."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1]
        query, key, value = jnp.split(nn.Dense(3 * size, name="qkv")(x), 3, -1)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        if self.decode:
            is_initialized = self.has_variable("cache", "keys")
            keys = self.variable("cache", "keys", jnp.zeros, key.shape, key.dtype)
            values = self.variable("cache", "values", jnp.zeros, value.shape, value.dtype)
            index = self.variable("cache", "index", lambda: jnp.array(0, jnp.int32))
            if is_initialized:
                i = index.value
                key = jax.lax.dynamic_update_slice(keys.value, key, (0, i, 0))
                value = jax.lax.dynamic_update_slice(values.value, value, (0, i, 0))
                keys.value, values.value, index.value = key, value, i + 1
                mask = (jnp.arange(key.shape[1]) <= i)[None]
        scores = jnp.where(mask, query @ key.swapaxes(1, 2) / size**0.5, -1e9)
        return nn.softmax(scores) @ value


class Decoder(nn.Module):
    """The layers in a loop."""

    vocabulary: int = 7
    width: int = 4
    depth: int = 2
    length: int = 5
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        x = Positions(self.length, self.decode)(x)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        for i in range(self.depth):
            x = CompactLayer(decode=self.decode, name=f"layer_{i}")(x, mask)
        x = SetupLayer(decode=self.decode)(x, mask)
        x = OwnCache(self.decode)(x)
        return nn.Dense(self.vocabulary, name="head")(x)


class Layers(nn.Module):
    """One layer inside of another module, whose width may be the length too."""

    width: int = 4
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, self.width, name="embed")(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        return CompactLayer(decode=self.decode)(x, mask)


class WholeOnly(nn.Module):
    """Has a cache, and takes no shorter sequence than the whole one."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            count.value += 1
        return nn.Dense(3)(x.reshape(x.shape[0], 12))


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


class Both(nn.Module):
    """Has a method that calls one half alone."""

    decode: bool = False

    def setup(self):
        self.reader = Reader()
        self.writer = SetupLayer(decode=self.decode)

    def write(self, x):
        return self.writer(x)

    def __call__(self, x):
        return self.reader(self.write(x))
