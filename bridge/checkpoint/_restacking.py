"""Leaves of a checkpoint under other paths: as they are, or made of others by a rule.

A leaf that is made of others has a `Stored` with a location that is in no file. When it is
read, the arrays that it is made of are read, sharded as the leaf will be, and moved along their
pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Path
from bridge._randomness.typed_keys import is_key
from bridge._rules.pieces import LeafShape, Piece, part_shape
from bridge._rules.rules import RulesError

from ._arrays import sharding_of
from ._renaming import Made, placements
from ._source import Source
from ._stored import Recipe, Record, Stored
from ._targets import TargetTree


def for_target(source: Source, target: TargetTree | None, table: Mapping[str, str]) -> Source:
    """A checkpoint with the paths of a target of the other library, which says the direction.

    Raises RulesError if a rule cannot be followed, two leaves get one path, or layers that are to
    be stacked are not all there.
    """
    if target is None:
        raise RulesError("no target", "one of the other library", "give it, or leave rules out")
    to_nnx = target.side == "nnx"
    first = 0 if source.layout == "nnx" else 1
    shapes = {
        (record.path[:first], record.path[first:]): shape_in(record) for record in source.variables
    }
    wanted = {path: shape_of(leaf.value) for path, leaf in target.leaves.items()}
    placed = placements(shapes, wanted, table, to_nnx=to_nnx)
    variables = restacked(source, source.variables, placed, to_nnx=to_nnx)
    return dataclasses.replace(source, variables=variables)


def shape_in(record: Record) -> LeafShape:
    """The shape of the array that a leaf has; None if it has several, or none."""
    shapes = [None if s.is_python else s.shape for s in record.stored.values()]
    return shapes[0] if len(shapes) == 1 else None


def restacked(
    source: Source, records: Sequence[Record], made: Mapping[Path, Made], *, to_nnx: bool
) -> list[Record]:
    """The leaves of a tree at other paths.

    `made` says what the leaf at each new path is made of. With `to_nnx`, the checkpoint's leaves
    are Linen's. Raises RulesError if one leaf is to be made of arrays of several dtypes.
    """
    by_path = {record.path: record for record in records}
    found: list[Record] = []
    for path, each in made.items():
        first = by_path[each.paths[0]]
        length, own = len(source.names(first.path)), source.names(path)
        stored = {(*own, *names[length:]): array for names, array in first.stored.items()}
        if each.shape is not None:
            ((names, array),) = stored.items()
            arrays = tuple(next(iter(by_path[p].stored.values())) for p in each.paths)
            check_dtypes(path, [array.dtype for array in arrays])
            stored[names] = dataclasses.replace(
                array,
                shape=each.shape,
                location=("restacked", *names),
                digest=None,
                recipe=Recipe(arrays, each, to_nnx),
            )
        found.append(dataclasses.replace(first, path=path, stored=stored))
    return found


def check_dtypes(path: Path, dtypes: Iterable[str]) -> None:
    """Raises RulesError if the arrays that one leaf is to be made of have several dtypes."""
    found = sorted(set(dtypes))
    if len(found) > 1:
        text = f"{'/'.join(map(str, path))}, made of {' and '.join(found)}"
        raise RulesError(text, "arrays of one dtype", "correct the table")


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
        for origin, piece in zip(stored.recipe.origins, stored.recipe.made.pieces, strict=True):
            needed[origin] = _abstract(origin, _of_origin(like, stored.recipe, origin, piece))
    values = source.read(needed)
    for stored, like in wanted.items():
        if stored.recipe is not None:
            origins, made, to_nnx = stored.recipe
            value = made.array([values[origin] for origin in origins], to_nnx=to_nnx)
            sharding = None if is_key(like) else sharding_of(like)
            values[stored] = value if sharding is None else jax.device_put(value, sharding)
    return values


def _abstract(stored: Stored, sharding: Sharding | None) -> Any:
    if sharding is None:
        return None
    return jax.ShapeDtypeStruct(stored.shape, jnp.dtype(stored.dtype), sharding=sharding)


def _of_origin(like: Any, recipe: Recipe, stored: Stored, piece: Piece) -> Sharding | None:
    """Where an array is read to: the shards of the result, with the axes of stacked layers whole.

    What a rule transposes, reshapes, splits or joins is read by each process as a whole.
    """
    sharding = None if is_key(like) else sharding_of(like)
    if not isinstance(sharding, NamedSharding):
        return sharding
    there, here = piece.linen_region, piece.nnx_region
    if not recipe.to_nnx:
        there, here = here, there
    shape = recipe.made.shape or ()
    is_same = part_shape(stored.shape, there) == part_shape(shape, here)
    if piece.axes is not None or not is_same or not all(cut.is_index for cut in there + here):
        return None
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    for cut in sorted(here, reverse=True):
        del spec[cut.axis]
    for cut in sorted(there):
        spec.insert(cut.axis, None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
