"""Leaves of a checkpoint under other paths: as they are, stacked, or as entries of stacked ones.

A leaf that is made of others has a `Stored` of its own, whose location no file has. When it is
read, the arrays that it is made of are read, sharded as the leaf will be, and cut and stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bridge._conversion.neutral import Path
from bridge._conversion.rules import RulesError, StackedLayer
from bridge._randomness.typed_keys import is_key

from ._arrays import sharding_of
from ._source import Source
from ._stored import Names, Record, Stored

Location: TypeAlias = tuple[Any, ...]


class LeafOrigin(NamedTuple):
    """What a leaf, or one entry of it, is made of.

    Attributes:
        path: the leaf of the checkpoint.
        cut: the entry of it, None for the whole.
    """

    path: Path
    cut: StackedLayer | None = None


class Made(NamedTuple):
    """A leaf under its new path.

    Attributes:
        axis: the axis on which the origins are stacked, None if it is one origin alone.
        origins: what it is made of, in order.
    """

    axis: int | None
    origins: Sequence[LeafOrigin]


class _Recipe(NamedTuple):
    """How one array is made: cut out of arrays of the checkpoint, and stacked.

    Attributes:
        axis: the axis on which it is stacked; None or not negative.
        parts: the arrays, each with the entry that is taken on an axis that is not negative.
        rank: the number of its axes.
    """

    axis: int | None
    parts: list[tuple[Stored, StackedLayer | None]]
    rank: int


def restacked(source: Source, made: Mapping[Path, Made]) -> Source:
    """A checkpoint whose leaves are at other paths.

    Args:
        source: the checkpoint.
        made: what the leaf at each new path is made of.

    Raises:
        RulesError: leaves that are to be stacked are not alike.
    """
    item = source.variables
    by_path = {record.path: record for record in item.records}
    records: list[Record] = []
    recipes: dict[Location, _Recipe] = {}
    problems: list[str] = []
    for path, each in made.items():
        first = by_path[each.origins[0].path]
        stored: dict[Names, Stored] = {}
        below_all = [n for o in each.origins for n in _names_below(source, by_path[o.path])]
        for below in dict.fromkeys(below_all):
            parts = [
                (by_path[o.path].stored.get((*source.names(o.path), *below)), o.cut)
                for o in each.origins
            ]
            found = [(s, cut) for s, cut in parts if s is not None]
            names = (*source.names(path), *below)
            if each.axis is None and found[0][1] is None:
                stored[names] = found[0][0]
            elif problem := _unlike(parts, each.axis):
                problems.append(f"{'/'.join(names)}, made of {problem}")
            else:
                recipe, stored[names] = _recipe(each.axis, found, ("restacked", *names))
                recipes[stored[names].location] = recipe
        records.append(dataclasses.replace(first, path=path, stored=stored))
    if problems:
        raise RulesError("; ".join(problems), "arrays of one shape and dtype", "correct the table")
    own = dataclasses.replace(item, records=records, read=_reader(item.read, recipes))
    return dataclasses.replace(source, variables=own)


def _names_below(source: Source, record: Record) -> list[Names]:
    """The names of the arrays in a leaf's value, below the leaf's own."""
    length = len(source.names(record.path))
    return [names[length:] for names in record.stored]


def _unlike(
    parts: Sequence[tuple[Stored | None, StackedLayer | None]], axis: int | None
) -> str | None:
    """Why arrays cannot be cut and stacked on an axis, None if they can."""
    texts = {"nothing" if s is None else f"{s.dtype}{list(s.shape)}" for s, _ in parts}
    if len(texts) > 1:
        return " and ".join(sorted(texts))
    ranks = {len(s.shape) + (cut is None) for s, cut in parts if s is not None and not s.is_python}
    if not ranks:
        return "Python numbers"
    if axis is not None and not all(-rank <= axis < rank for rank in ranks):
        return f"{texts.pop()} on axis {axis}"
    return None


def _recipe(
    axis: int | None, parts: list[tuple[Stored, StackedLayer | None]], location: Location
) -> tuple[_Recipe, Stored]:
    """How an array is made, and what a checkpoint would say of it."""
    own: list[tuple[Stored, StackedLayer | None]] = []
    shape: list[int] = []
    for stored, cut in parts:
        shape = list(stored.shape)
        entry = None if cut is None else StackedLayer(cut.axis % len(shape), cut.number)
        if entry is not None:
            del shape[entry.axis]
        own.append((stored, entry))
    if axis is not None:
        axis %= len(shape) + 1
        shape.insert(axis, len(parts))
    first = parts[0][0]
    origins = tuple(stored for stored, _ in parts)
    made = dataclasses.replace(
        first, shape=tuple(shape), location=location, digest=None, origins=origins
    )
    return _Recipe(axis, own, len(shape)), made


def _reader(
    read: Callable[[Mapping[Location, Any]], Mapping[Location, Any]],
    recipes: Mapping[Location, _Recipe],
) -> Callable[[Mapping[Location, Any]], Mapping[Location, Any]]:
    """Reads arrays that are made of others too; these others are among the values as well."""

    def read_and_make(wanted: Mapping[Location, Any]) -> Mapping[Location, Any]:
        needed = {location: like for location, like in wanted.items() if location not in recipes}
        for location in wanted.keys() & recipes.keys():
            for stored, cut in recipes[location].parts:
                sharding = _of_origin(wanted[location], recipes[location], cut)
                needed[stored.location] = _abstract(stored, sharding)
        values = dict(read(needed))
        for location in wanted.keys() & recipes.keys():
            recipe = recipes[location]
            parts = [_taken(values[stored.location], cut) for stored, cut in recipe.parts]
            made = parts[0] if recipe.axis is None else _stacked(parts, recipe.axis)
            sharding = sharding_of(wanted[location])
            is_placed = isinstance(made, jax.Array) and sharding is not None
            values[location] = jax.device_put(made, sharding) if is_placed else made
        return values

    return read_and_make


def _abstract(stored: Stored, sharding: Sharding | None) -> Any:
    if sharding is None:
        return None
    return jax.ShapeDtypeStruct(stored.shape, jnp.dtype(stored.dtype), sharding=sharding)


def _of_origin(like: Any, recipe: _Recipe, cut: StackedLayer | None) -> Sharding | None:
    """Where an array is read to: its axes that the result has keep the mesh axes of the result."""
    sharding = None if is_key(like) else sharding_of(like)
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = list(sharding.spec) + [None] * (recipe.rank - len(sharding.spec))
    if recipe.axis is not None:
        del spec[recipe.axis]
    if cut is not None:
        spec.insert(cut.axis, None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _taken(value: Any, cut: StackedLayer | None) -> Any:
    if cut is None:
        return value
    if isinstance(value, jax.Array):
        # The index is an argument of the compiled program: one program for all entries.
        return jax.lax.dynamic_index_in_dim(value, cut.number, cut.axis, keepdims=False)
    return np.take(value, cut.number, axis=cut.axis)


def _stacked(parts: Sequence[Any], axis: int) -> Any:
    if all(isinstance(part, np.ndarray | np.generic) for part in parts):
        return np.stack(parts, axis)
    return jnp.stack(parts, axis)
