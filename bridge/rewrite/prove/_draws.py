"""Keys that all draw the same numbers, so that two models drop the same elements.

Linen folds a path into a key and NNX counts draws, so no key makes both draw the same mask. A
generator of our own, which JAX allows, makes bits that depend only on the shape. With it both
models draw the same mask, and a training step can be compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import random as generators

from bridge.rewrite.plan._axes import streams_of
from bridge.rewrite.plan._plans import Program

_WIDTHS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
_SPREAD = 2654435769  # The golden ratio of 2**32: neighbours get bits that are far apart.


def _data(shape: Iterable[int]) -> jax.Array:
    return jnp.zeros((*shape, 2), jnp.uint32)


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> jax.Array:
    counted = (jnp.arange(math.prod(shape), dtype=jnp.uint32) + 1) * jnp.uint32(_SPREAD)
    return (counted ^ (counted >> 15)).astype(_WIDTHS[width]).reshape(shape)


@functools.cache
def _generator() -> Any:
    return generators.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: _data(()),
        split=lambda key, shape: _data(shape),
        random_bits=_bits,
        fold_in=lambda key, data: key,
        name="bridge_same",
        tag="same",
    )


def same_key() -> jax.Array:
    """A key that draws what every other one of its kind draws."""
    return jax.random.key(0, impl=_generator())


def is_same_kind(dtype: Any) -> bool:
    """Whether keys of a type are of this kind."""
    return str(dtype) == "key<same>"


def streams(program: Program) -> dict[str, jax.Array]:
    """Such a key for every stream that a Linen model may draw from."""
    names = {"params", "dropout"}
    for making in program.records.makings:
        if making.kind == "make_rng":
            names |= {name for name in [making.name] if isinstance(name, str)}
        elif making.kind == "module":
            own = making.made.get("rng_collection")
            names |= {own} if isinstance(own, str) else set()
    return dict.fromkeys(sorted(names), same_key())


def draws(program: Program) -> bool:
    """Whether a model draws keys when it is in training."""
    return any(map(streams_of, program.records.makings))


def drawn_in_calls(program: Program) -> list[str]:
    """The streams that calls of a model draw from, empty if no call draws."""
    return sorted({*streams(program)} - {"params"}) if draws(program) else []


def with_same_keys(model: Any) -> None:
    """Gives every stream of an NNX model such a key."""
    state = nnx.state(model, nnx.RngKey)
    key = same_key()
    nnx.update(
        model,
        jax.tree.map(lambda leaf: jnp.broadcast_to(key, leaf.shape), state),
    )
