"""Reads arrays of a checkpoint, also such as a rule makes of others.

The arrays that one is made of are read sharded as it will be, and moved along their pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bridge._randomness.typed_keys import is_key
from bridge._rules.pieces import assembled, part_shape

from ._arrays import sharding_of
from ._source import Source
from ._stored import Recipe, Stored


def groups_of(arrays: Iterable[Stored]) -> list[list[Stored]]:
    """Arrays in groups to be read together: the checkpoint's own, and those of the same origins.

    What is made of other arrays takes as much memory again while these are held.
    """
    by_origin: dict[Stored | None, list[Stored]] = {None: []}
    for array in arrays:
        origin = array.recipe.origins[0] if array.recipe else None
        by_origin.setdefault(origin, []).append(array)
    return list(by_origin.values())


def read(source: Source, wanted: Mapping[Stored, Any]) -> dict[Stored, Any]:
    """Arrays, also such as are made of others; these others are among the values as well.

    `wanted` has with each array the leaf that it replaces.
    """
    needed: dict[Stored, Any] = {}
    for stored, like in wanted.items():
        if stored.recipe is None:
            needed[stored] = like
            continue
        sharding = _sharding_for(like)
        for number, origin in enumerate(stored.recipe.origins):
            own = _of_origin(sharding, stored.shape, stored.recipe, number)
            dtype = jnp.dtype(origin.dtype)
            needed[origin] = own and jax.ShapeDtypeStruct(origin.shape, dtype, sharding=own)
    values = source.read(needed)
    for stored, like in wanted.items():
        if stored.recipe is not None:
            origins, pieces, to_nnx = stored.recipe
            parts = zip(pieces, (values[origin] for origin in origins), strict=True)
            value = assembled([p.moved(v, stored.shape, to_nnx=to_nnx) for p, v in parts])
            sharding = _sharding_for(like)
            values[stored] = value if sharding is None else jax.device_put(value, sharding)
    return values


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
