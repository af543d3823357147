"""A language model whose configuration says everything: modes, dtypes, caches and sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct


@struct.dataclass
class Config:
    vocabulary: int = 7
    width: int = 4
    length: int = 5
    rate: float = 0.5
    deterministic: bool = True
    decode: bool = False
    share: bool = False
    dtype: Any = jnp.float32
    table_init: Callable | None = None


class Positions(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, positions=None):
        config = self.config
        shape = (1, config.length, x.shape[-1])
        if config.table_init is None:
            table = jnp.sin(jnp.arange(config.length))[None, :, None] * jnp.ones(shape)
        else:
            table = self.param("table", config.table_init, shape)
        found = table[:, : x.shape[1]]
        if config.decode:
            is_initialized = self.has_variable("cache", "index")
            index = self.variable("cache", "index", lambda: jnp.array(0, jnp.uint32))
            if is_initialized:
                i = index.value
                index.value = i + 1
                found = jax.lax.dynamic_slice(table, jnp.array((0, i, 0)), (1, 1, x.shape[-1]))
        return x + (found if positions is None else jnp.take(found[0], positions, axis=0))


class CompactBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask=None):
        config = self.config
        y = nn.MultiHeadDotProductAttention(
            num_heads=2,
            dtype=config.dtype,
            dropout_rate=config.rate,
            broadcast_dropout=False,
            deterministic=config.deterministic,
            decode=config.decode,
        )(nn.LayerNorm(dtype=config.dtype)(x), mask=mask)
        drop = nn.Dropout(config.rate, deterministic=config.deterministic)
        return x + drop(y)


class SetupBlock(nn.Module):
    config: Config

    def setup(self):
        config = self.config
        self.dense = nn.Dense(config.width, dtype=config.dtype)
        self.drop = nn.Dropout(config.rate, deterministic=config.deterministic)

    def __call__(self, x):
        return x + self.drop(self.dense(x))


class Half(nn.Module):
    """Embeds, with a table of its own or with one that it is given."""

    config: Config
    embed: Any = None

    @nn.compact
    def __call__(self, tokens, positions=None, mask=None):
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width) if self.embed is None else self.embed
        x = Positions(config)(embed(tokens), positions)
        return SetupBlock(config)(CompactBlock(config)(x, mask))


class Model(nn.Module):
    config: Config

    def setup(self):
        config = self.config
        self.table = nn.Embed(config.vocabulary, config.width) if config.share else None
        self.first = Half(config, self.table)
        self.second = Half(config, self.table)

    def __call__(self, tokens, positions=None):
        mask = None if self.config.decode else nn.make_causal_mask(tokens)
        x = self.first(tokens, positions, mask) + self.second(tokens, positions, mask)
        return x.astype(jnp.float32)
