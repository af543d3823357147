"""Reads arrays out of an orbax tree: the wanted ones only, each directly in its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.core import Tracer

from bridge._errors import CheckpointError
from bridge._randomness.typed_keys import from_bits, is_key

from ._failures import quiet_orbax, reason
from ._stored import PYTHON_TYPES, Stored, key_of

WantedArrays = Mapping[tuple[Any, ...], Any]

# After so many arrays that cannot be read the others are not tried one by one: each attempt costs a
# walk through the whole tree.
_FAILURES = 20
_REMEDY = "The files are damaged or incomplete; restore an earlier checkpoint."


def read(directory: Any, tree: Any, wanted: WantedArrays) -> dict[tuple[Any, ...], Any]:
    """The arrays at some places of an orbax tree, which is opened in any case.

    `tree` has nested dicts and lists with a `Stored` for each array. `wanted` has, by location, the
    array, abstract array or scalar that the value replaces, None if there is none. Its sharding
    decides where the value goes. A value is a `jax.Array` where there is a sharding, else a NumPy
    array. Raises CheckpointError with the names of arrays that cannot be read.
    """
    if not tree:
        return {}
    _check_shardings(directory, wanted)
    try:
        return _read(directory, tree, wanted)
    except Exception as error:
        # Orbax reports the first array that fails, and not always which one.
        tried = {location: why for location, _, why in each(directory, tree, list(wanted))}
        failed = {location: why for location, why in tried.items() if why}
        failed = failed or dict.fromkeys(wanted or [(directory,)], reason(error))
        raise CheckpointError(
            "arrays cannot be read from",
            directory,
            f"{_REMEDY} Nothing was changed in memory.",
            unreadable=[("/".join(map(str, where)), why) for where, why in failed.items()],
        ) from error


def _check_shardings(directory: Any, wanted: WantedArrays) -> None:
    """Raises an error for shardings that do not divide the shapes they are for."""
    problems: list[tuple[str, str]] = []
    for location, like in wanted.items():
        sharding = sharding_of(like)
        if sharding is None:
            continue
        try:
            sharding.shard_shape(like.shape)
        except ValueError as error:
            problems.append(("/".join(map(str, location)), reason(error)))
    if problems:
        raise CheckpointError(
            "the target's shardings do not divide these arrays of",
            directory,
            "Pass shardings with axes that divide the shapes. The files are intact, and nothing"
            " was changed.",
            unreadable=problems,
        )


def each(
    directory: Any, tree: Any, locations: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[tuple[Any, ...], Any, str | None]]:
    """The arrays at some places of an orbax tree as NumPy arrays, and why some cannot be read.

    Yields (location, array, None), or (location, None, reason). `tree` is as for `read`.
    """
    pending = [locations] if locations else []
    failures = 0
    while pending:
        batch = pending.pop()
        try:
            values = _read(directory, tree, dict.fromkeys(batch))
        except Exception as error:
            if len(batch) == 1 or failures >= _FAILURES:
                failures += 1
                why = reason(error)
                for location in batch:
                    # Orbax gives each array a directory; the reason is the same for all of them.
                    why = why.replace(".".join(map(str, location)) + "/", "…/")
                yield from ((location, None, why) for location in batch)
            else:
                half = len(batch) // 2
                pending += [batch[half:], batch[:half]]
        else:
            yield from ((location, values[location], None) for location in batch)


def _read(directory: Any, tree: Any, wanted: WantedArrays) -> dict[tuple[Any, ...], Any]:
    def mapped(function: Any) -> Any:
        return jax.tree.map(function, tree, is_leaf=lambda leaf: isinstance(leaf, Stored))

    arguments = ocp.args.PyTreeRestore(
        item=mapped(lambda s: 0 if s.location in wanted else ocp.PLACEHOLDER),
        restore_args=mapped(lambda s: _restore_args(s, wanted.get(s.location))),
    )
    with quiet_orbax():
        restored = ocp.PyTreeCheckpointHandler().restore(directory, args=arguments)
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

    `value` is what was read, None for what is not among the arrays.
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
    """A value that was read, for the place of `like`, or as it was saved without one.

    `like` is an array, an abstract array or a scalar.
    """
    if like is None:
        return as_stored(stored, value)
    is_array = isinstance(value, jax.Array) and not is_key(like)
    if is_array and value.dtype == getattr(like, "dtype", None):
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
