"""Reads values for the leaves of a target, also those that a rule makes of several arrays.

The arrays that one is made of are read sharded as it will be, and moved along their pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bridge._randomness.typed_keys import is_key
from bridge._rules.pieces import assembled, part_shape

from ._arrays import as_like, sharding_of
from ._source import Source
from ._stored import Recipe, Stored, batches


def read(source: Source, likes: Mapping[Stored, Any]) -> dict[Stored, Any]:
    """Values, each for the place of the leaf in `likes`, or as it was saved for None."""
    # What is made of other arrays takes as much memory again while these are held.
    by_origin: dict[Stored | None, list[Stored]] = {}
    for stored in likes:
        origin = stored.recipe.origins[0] if stored.recipe else None
        by_origin.setdefault(origin, []).append(stored)
    values: dict[Stored, Any] = {}
    for batch in batches(by_origin.values()):
        needed: dict[Stored, Any] = {}
        for stored in batch:
            if stored.recipe and stored.is_read:
                needed |= _origins(stored, stored.recipe, _sharding_for(likes[stored]))
            elif stored.is_read:
                needed[stored] = likes[stored]
        found = source.read(needed)
        for stored in batch:
            like = likes[stored]
            if stored.recipe and stored.is_read:
                value = _made(stored, stored.recipe, found, _sharding_for(like))
            else:
                value = found.pop(stored, None)
            values[stored] = as_like(stored, value, like)
    return values


def _origins(stored: Stored, recipe: Recipe, sharding: Sharding | None) -> dict[Stored, Any]:
    """The arrays that one is made of, each with what says where it is read to."""
    needed: dict[Stored, Any] = {}
    for number, origin in enumerate(recipe.origins):
        own = _of_origin(sharding, stored.shape, recipe, number)
        dtype = jnp.dtype(origin.dtype) if own else None
        needed[origin] = own and jax.ShapeDtypeStruct(origin.shape, dtype, sharding=own)
    return needed


def _made(
    stored: Stored, recipe: Recipe, found: Mapping[Stored, Any], sharding: Sharding | None
) -> Any:
    parts = zip(recipe.pieces, (found[origin] for origin in recipe.origins), strict=True)
    value = assembled([p.moved(v, stored.shape, to_nnx=recipe.to_nnx) for p, v in parts])
    return value if sharding is None else jax.device_put(value, sharding)


def _sharding_for(like: Any) -> Sharding | None:
    return None if is_key(like) else sharding_of(like)


def _of_origin(
    sharding: Sharding | None, shape: tuple[int, ...], recipe: Recipe, number: int
) -> Sharding | None:
    """Where an array is read to: the shards of the result, with the axes of stacked layers whole.

    What a rule transposes, reshapes, splits or joins is read by each process as a whole.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    piece = recipe.pieces[number]
    there, here = piece.linen_region, piece.nnx_region
    if not recipe.to_nnx:
        there, here = here, there
    is_same = part_shape(recipe.origins[number].shape, there) == part_shape(shape, here)
    if piece.axes is not None or not is_same or not all(cut.is_index for cut in there + here):
        return None
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    for cut in sorted(here, reverse=True):
        del spec[cut.axis]
    for cut in sorted(there):
        spec.insert(cut.axis, None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
