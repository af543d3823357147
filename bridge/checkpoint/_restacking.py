"""Leaves of a checkpoint under other paths: as they are, or made of others by a rule.

A leaf that is made of others has a `Stored` of its own, whose location no file has. When it is
read, the arrays that it is made of are read, sharded as the leaf will be, and moved along their
pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bridge._conversion.neutral import Path
from bridge._randomness.typed_keys import is_key
from bridge._rules.pieces import Piece, assembled, layer_cut, part_shape
from bridge._rules.rules import Layer, RulesError

from ._arrays import sharding_of
from ._source import Item, Source
from ._stored import Names, Record, Stored, describe

Location: TypeAlias = tuple[Any, ...]

# How many bytes are made of other arrays at once.
_BATCH = 2**28


class LeafOrigin(NamedTuple):
    """What a leaf, or one entry or part of it, is made of.

    Attributes:
        path: the leaf of the checkpoint.
        cut: the entry of it, None for the whole.
        entry: the entry that it becomes, None for the whole.
        piece: how the two go together if the rule does more than stack, from the target as `linen`
            or as `nnx` as the case may be.
    """

    path: Path
    cut: Layer | None = None
    entry: Layer | None = None
    piece: Piece | None = None


class Made(NamedTuple):
    """A leaf under its new path.

    Attributes:
        origins: what it is made of, in order.
        shape: its shape, None if its origins tell it.
    """

    origins: Sequence[LeafOrigin]
    shape: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is one leaf of the checkpoint as it is."""
        return len(self.origins) == 1 and self.origins[0][1:] == (None, None, None)


class _Recipe(NamedTuple):
    """How one array is made of arrays of the checkpoint.

    Attributes:
        parts: the arrays with what becomes of them.
        shape: its shape.
        to_nnx: whether the arrays are Linen's.
    """

    parts: list[tuple[Stored, Piece]]
    shape: tuple[int, ...]
    to_nnx: bool

    def made(self, values: Iterable[Any]) -> Any:
        """The array, made of the values of the parts."""
        return assembled(
            [
                piece.moved(value, self.shape, to_nnx=self.to_nnx)
                for value, (_, piece) in zip(values, self.parts, strict=True)
            ]
        )


def restacked(source: Source, item: Item, made: Mapping[Path, Made], *, to_nnx: bool) -> Item:
    """A tree of a checkpoint whose leaves are at other paths.

    Args:
        source: the checkpoint.
        item: the tree.
        made: what the leaf at each new path is made of.
        to_nnx: whether the checkpoint's leaves are Linen's.

    Raises:
        RulesError: leaves that are to be stacked are not alike.
    """
    by_path = {record.path: record for record in item.records}
    records: list[Record] = []
    recipes: dict[Location, _Recipe] = {}
    problems: list[str] = []
    for path, each in made.items():
        first = by_path[each.origins[0].path]
        stored: dict[Names, Stored] = {}
        below_all = [n for o in each.origins for n in _names_below(source, by_path[o.path])]
        for below in dict.fromkeys(below_all):
            found = [
                by_path[o.path].stored.get((*source.names(o.path), *below)) for o in each.origins
            ]
            names = (*source.names(path), *below)
            if each.is_whole and found[0] is not None:
                stored[names] = found[0]
            elif problem := _unlike(found, each):
                problems.append(f"{'/'.join(names)}, made of {problem}")
            else:
                arrays = [array for array in found if array is not None]
                recipe = _recipe(each, arrays, to_nnx)
                location = ("restacked", *names)
                recipes[location] = recipe
                stored[names] = dataclasses.replace(
                    arrays[0],
                    shape=recipe.shape,
                    location=location,
                    digest=None,
                    origins=tuple(arrays),
                )
        records.append(dataclasses.replace(first, path=path, stored=stored))
    if problems:
        raise RulesError("; ".join(problems), "arrays of one shape and dtype", "correct the table")
    return dataclasses.replace(item, records=records, read=_reader(item.read, recipes))


def value_of(made: Made, values: Sequence[Any], *, to_nnx: bool) -> Any:
    """A leaf's value, made of the values of other leaves.

    Args:
        made: what it is made of.
        values: the values, in the same order.
        to_nnx: whether these are Linen's.

    Raises:
        RulesError: they are not alike.
    """
    if made.is_whole:
        return values[0]
    flat = [jax.tree.flatten(value) for value in values]
    problem = None
    if len({tree for _, tree in flat}) > 1:
        problem = "leaves of several structures"
    found: list[Any] = []
    for arrays in zip(*(leaves for leaves, _ in flat), strict=False):
        stored = [describe(array) for array in arrays]
        problem = problem or _unlike(stored, made)
        if problem is None:
            found.append(_recipe(made, stored, to_nnx).made(arrays))
    if problem:
        paths = " and ".join("/".join(map(str, origin.path)) for origin in made.origins)
        raise RulesError(
            f"{paths}, of {problem}", "arrays of one shape and dtype", "correct the table"
        )
    return jax.tree.unflatten(flat[0][1], found)


def batches(arrays: Iterable[Stored]) -> list[list[Stored]]:
    """Arrays in groups to be read one after the other, with those of the same origins together.

    What is made of other arrays takes as much memory again while these are held.
    """
    by_origin: dict[Location | None, list[Stored]] = {None: []}
    for array in arrays:
        origin = array.origins[0].location if array.origins else None
        by_origin.setdefault(origin, []).append(array)
    found, size = [by_origin.pop(None)], _BATCH
    for group in by_origin.values():
        if size >= _BATCH:
            found.append([])
            size = 0
        found[-1] += group
        size += sum(array.nbytes for array in group)
    return found


def _names_below(source: Source, record: Record) -> list[Names]:
    """The names of the arrays in a leaf's value, below the leaf's own."""
    length = len(source.names(record.path))
    return [names[length:] for names in record.stored]


def _unlike(arrays: Sequence[Stored | None], made: Made) -> str | None:
    """Why a leaf cannot be made of arrays, None if it can."""
    has_pieces = made.origins[0].piece is not None
    texts = {
        "nothing" if s is None else s.dtype if has_pieces else f"{s.dtype}{list(s.shape)}"
        for s in arrays
    }
    if len(texts) > 1:
        return " and ".join(sorted(texts))
    entry = made.origins[0].entry
    ranks = {
        len(s.shape) + (o.cut is None)
        for s, o in zip(arrays, made.origins, strict=True)
        if s is not None and not s.is_python
    }
    if not ranks:
        return "Python numbers"
    if entry is not None and not all(-rank <= entry.axis < rank for rank in ranks):
        return f"{texts.pop()} on axis {entry.axis}"
    return None


def _recipe(made: Made, arrays: Sequence[Stored], to_nnx: bool) -> _Recipe:
    """How an array is made; stacked ones are all cut and stacked alike."""
    shape = made.shape
    if shape is None:
        cut, entry = made.origins[0][1:3]
        own = list(part_shape(arrays[0].shape, layer_cut(arrays[0].shape, cut)))
        if entry is not None:
            own.insert(entry.axis % (len(own) + 1), len(arrays))
        shape = tuple(own)
    parts: list[tuple[Stored, Piece]] = []
    for origin, array in zip(made.origins, arrays, strict=True):
        piece = origin.piece
        if piece is None:
            there, here = layer_cut(array.shape, origin.cut), layer_cut(shape, origin.entry)
            piece = Piece(None, None, *((there, here) if to_nnx else (here, there)))
        parts.append((array, piece))
    return _Recipe(parts, shape, to_nnx)


def _reader(
    read: Callable[[Mapping[Location, Any]], Mapping[Location, Any]],
    recipes: Mapping[Location, _Recipe],
) -> Callable[[Mapping[Location, Any]], Mapping[Location, Any]]:
    """Reads arrays that are made of others too; these others are among the values as well."""

    def read_and_make(wanted: Mapping[Location, Any]) -> Mapping[Location, Any]:
        needed = {location: like for location, like in wanted.items() if location not in recipes}
        for location in wanted.keys() & recipes.keys():
            recipe = recipes[location]
            for stored, piece in recipe.parts:
                sharding = _of_origin(wanted[location], recipe, stored, piece)
                needed[stored.location] = _abstract(stored, sharding)
        values = dict(read(needed))
        for location in wanted.keys() & recipes.keys():
            recipe = recipes[location]
            made = recipe.made(values[stored.location] for stored, _ in recipe.parts)
            sharding = sharding_of(wanted[location])
            is_placed = isinstance(made, jax.Array) and sharding is not None
            values[location] = jax.device_put(made, sharding) if is_placed else made
        return values

    return read_and_make


def _abstract(stored: Stored, sharding: Sharding | None) -> Any:
    if sharding is None:
        return None
    return jax.ShapeDtypeStruct(stored.shape, jnp.dtype(stored.dtype), sharding=sharding)


def _of_origin(like: Any, recipe: _Recipe, stored: Stored, piece: Piece) -> Sharding | None:
    """Where an array is read to: its axes that the result has keep the mesh axes of the result."""
    sharding = None if is_key(like) else sharding_of(like)
    if not isinstance(sharding, NamedSharding):
        return sharding
    there, here = piece.linen_region, piece.nnx_region
    order = piece.axes
    if not recipe.to_nnx:
        there, here = here, there
        order = order and tuple(order.index(axis) for axis in range(len(order)))
    spec = list(sharding.spec) + [None] * (len(recipe.shape) - len(sharding.spec))
    gone = {cut.axis for cut in here if cut.is_index}
    cut_up = {cut.axis for cut in here if not cut.is_index}
    sizes = part_shape(recipe.shape, here)
    kept = [None if n in cut_up else own for n, own in enumerate(spec) if n not in gone]
    before = part_shape(stored.shape, there)
    found: list[Any] = [None] * len(before)
    for n, axis in enumerate(order or range(len(before))):
        # Behind the first axis that a reshape changes, nothing tells which is which.
        if n >= len(sizes) or before[axis] != sizes[n]:
            break
        found[axis] = kept[n]
    for cut in sorted(there):
        if cut.is_index:
            found.insert(cut.axis, None)
        else:
            found[cut.axis] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*found), memory_kind=sharding.memory_kind)
