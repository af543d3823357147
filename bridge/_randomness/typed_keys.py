"""Typed PRNG keys <-> the bits that files hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: object) -> bool:
    """Whether this is an array, possibly abstract, of typed PRNG keys."""
    has_dtype = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    return has_dtype and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def to_bits(value: Any) -> Any:
    """The bits of typed PRNG keys, abstract if they are; anything else as it is."""
    if not is_key(value):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, value)
    return jax.random.key_data(value)


def from_bits(like: object, value: object) -> Any:
    """Keys of the implementation of `like` from their bits; the inverse of `to_bits`.

    `like` may be abstract. If it holds no keys, or `value` already does, `value` stays as it is.
    """
    if not is_key(like) or is_key(value) or not hasattr(value, "dtype"):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=implementation(like))


def implementation(keys: object) -> str:
    """The name of the PRNG that keys are for; `jax.random.key_impl` wants no abstract ones."""
    found: list[str] = []
    jax.eval_shape(lambda traced: found.append(str(jax.random.key_impl(traced))), keys)
    return found[0]
