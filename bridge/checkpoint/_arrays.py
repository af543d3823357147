"""Reads arrays out of an orbax tree: the wanted ones only, each directly in its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.core import Tracer

from bridge._errors import CheckpointError
from bridge._typed_keys import from_bits, is_key

from ._stored import PYTHON_TYPES, Stored, key_of

Wanted = Mapping[tuple[Any, ...], Any]


def read(directory: Any, tree: Any, wanted: Wanted) -> dict[tuple[Any, ...], Any]:
    """The arrays at some places of an orbax tree.

    Args:
      directory: the tree's directory.
      tree: nested dicts and lists with a `Stored` for each array.
      wanted: by location, the array, abstract array or scalar whose place the value takes, None if
        there is none. Its sharding decides where the value goes.

    Returns:
      Values by location: a `jax.Array` where there is a sharding, else NumPy arrays.

    Raises:
      CheckpointError: arrays cannot be read; it names them.
    """
    if not wanted:
        return {}
    try:
        return _read(directory, tree, wanted)
    except Exception as error:
        # Orbax reports the first array that fails, and not always which one.
        reasons = {location: _reason(directory, tree, location) for location in wanted}
        failed = {location: reason for location, reason in reasons.items() if reason}
        failed = failed or dict.fromkeys(wanted, first_line(error))
        raise CheckpointError(
            "arrays cannot be read from",
            directory,
            "The files are damaged or incomplete; restore an earlier checkpoint. Nothing was"
            " changed in memory.",
            unreadable=[("/".join(map(str, where)), reason) for where, reason in failed.items()],
        ) from error


def first_line(error: BaseException) -> str:
    """What went wrong, short enough for a list."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _reason(directory: Any, tree: Any, location: tuple[Any, ...]) -> str | None:
    """Why an array cannot be read, None if it can."""
    try:
        _read(directory, tree, {location: None})
    except Exception as error:
        return first_line(error)
    return None


def _read(directory: Any, tree: Any, wanted: Wanted) -> dict[tuple[Any, ...], Any]:
    def mapped(function: Any) -> Any:
        return jax.tree.map(function, tree, is_leaf=lambda leaf: isinstance(leaf, Stored))

    restored = ocp.PyTreeCheckpointHandler().restore(
        directory,
        args=ocp.args.PyTreeRestore(
            item=mapped(lambda s: 0 if s.location in wanted else ocp.PLACEHOLDER),
            restore_args=mapped(lambda s: _restore_args(s, wanted.get(s.location))),
        ),
    )
    found = jax.tree_util.tree_flatten_with_path(restored)[0]
    values = {tuple(map(key_of, keys)): value for keys, value in found}
    return {location: values[location] for location in wanted}


def _restore_args(stored: Stored, like: Any) -> Any:
    if stored.kind == "str":
        return ocp.RestoreArgs()
    sharding = sharding_of(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def sharding_of(like: Any) -> jax.sharding.Sharding | None:
    """Where a value has to be, None if that is left to JAX."""
    if isinstance(like, Tracer):
        return None
    if isinstance(like, jax.Array):
        # An uncommitted array follows the others of a computation to their devices.
        return like.sharding if like.committed else None
    return like.sharding if isinstance(like, jax.ShapeDtypeStruct) else None


def as_stored(stored: Stored, value: Any) -> Any:
    """What was saved, from what was read: the same kind of array or scalar.

    Args:
      stored: what the checkpoint says of it.
      value: what was read; None for what is not among the arrays.
    """
    if stored.is_python:
        content = value if stored.content is None else stored.content
        if stored.kind == "float" and isinstance(content, str):
            return float.fromhex(content)
        return PYTHON_TYPES[stored.kind](content)
    if not stored.is_read:
        value = _without_elements(stored)
    if stored.kind == "key" and not is_key(value):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=stored.content)
    if stored.kind == "generic":
        return np.asarray(value)[()]
    return np.asarray(value) if stored.kind == "numpy" else jnp.asarray(value)


def as_like(stored: Stored, value: Any, like: Any) -> Any:
    """A value for the place of another one.

    Args:
      stored: what the checkpoint says of it.
      value: what was read.
      like: the array, abstract array or scalar whose place it takes.
    """
    if isinstance(value, jax.Array) and not is_key(like):
        return value
    made = as_stored(stored, value)
    if is_key(like):
        made = from_bits(like, made)
    elif type(like) in PYTHON_TYPES.values():
        return type(like)(made)
    elif isinstance(like, np.generic):
        return np.asarray(made, like.dtype)[()]
    elif isinstance(like, np.ndarray):
        return np.asarray(made, like.dtype)
    else:
        made = jnp.asarray(made, like.dtype)
    sharding = sharding_of(like)
    return made if sharding is None else jax.device_put(made, sharding)


def _without_elements(stored: Stored) -> Any:
    if stored.kind == "key":
        size = jax.random.key_data(jax.random.key(0, impl=stored.content)).shape
        return np.zeros((*stored.shape, *size), np.uint32)
    return np.zeros(stored.shape, jnp.dtype(stored.dtype))
