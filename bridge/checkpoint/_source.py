"""Opens a checkpoint, whoever wrote it, and reads its arrays."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

import registry
from bridge._conversion.neutral import Key, Path, nest
from bridge._errors import CheckpointError, CheckpointNotFoundError, did_you_mean, listed

from . import _arrays, _digests, _notes, _single_files
from ._failures import quiet_orbax, reason, reported
from ._files import VARIABLES, Found, find
from ._stored import (
    Location,
    Names,
    Record,
    Stored,
    describe,
    key_of,
    names_of,
    parts,
    stored_in,
)

_T = TypeVar("_T")

# A read that is disturbed this often is given up.
_TRIES = 10
# The fields of a Linen TrainState that hold no variables.
_NOT_VARIABLES = frozenset({"opt_state", "step"})
# A class name and a number, as in Linen's automatic names.
_AUTOMATIC = re.compile(r"_*[A-Z]\w*_\d+")


@dataclasses.dataclass(frozen=True)
class Source:
    """An open checkpoint.

    Attributes:
      path: where it is.
      format: `orbax`, `msgpack`, `safetensors` or `npz`.
      layout: `bridge`, `linen` or `nnx`.
      variables: the leaves of the model.
      extra: the leaves of the other trees by name.
      trees: by name, the directory of each orbax tree, and nested dicts and lists with a `Stored`
        for each array in it.
      loaded: the arrays of a single file by location.
      written_by: the side that a checkpoint of the bridge was saved from.
      is_intact: whether what it says of its leaves has the digest that was stored; None if none
        was.
      is_params_alone: whether the checkpoint names no collection and is taken for parameters alone.
        Its leaves are matched by path alone, as those of an NNX state.
      digests: of each array that was read, the part of this process in its digest; None to leave
        them out.
    """

    path: Any
    format: str
    layout: str
    variables: Sequence[Record]
    extra: Mapping[str, Sequence[Record]]
    trees: Mapping[str, tuple[Any, Any]]
    loaded: Mapping[Location, Any] = dataclasses.field(default_factory=dict)
    written_by: str | None = None
    is_intact: bool | None = None
    is_params_alone: bool = False
    digests: list[tuple[Stored, int]] | None = None

    def names(self, path: Path) -> Names:
        """The names of a path's keys in this checkpoint."""
        if self.layout == "bridge":
            return names_of(path)
        return tuple(map(str, path))

    def read(self, wanted: Mapping[Stored, Any]) -> dict[Stored, Any]:
        """Arrays of the checkpoint, all of them or none.

        `wanted` has with each array the leaf that it replaces, None if there is none.
        """
        if not self.trees:
            return {stored: self.loaded[stored.location] for stored in wanted}
        likes: dict[str, dict[Location, Any]] = {}
        for stored, like in wanted.items():
            likes.setdefault(stored.tree, {})[stored.location] = like
        values = {name: _arrays.read(*self.trees[name], own) for name, own in likes.items()}
        found = {stored: values[stored.tree][stored.location] for stored in wanted}
        if self.digests is not None:
            self.digests.extend((s, _digests.own_part(value)) for s, value in found.items())
        return found

    def check_arrays(self) -> None:
        """Raises CheckpointError if the arrays of a tree cannot be opened."""
        for tree in self.trees.values():
            _arrays.read(*tree, {})


def read_from(
    path: str | os.PathLike[str],
    read: Callable[[Source], _T],
    *,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    beside: Collection[str] = (),
) -> _T:
    """What `read` makes of the checkpoint at a path, all of it of one checkpoint.

    It begins again when another program replaces the checkpoint meanwhile.

    Args:
      path: a directory or file.
      read: gets what is there, before arrays are read where the format allows.
      within: the keys of the model's tree in a checkpoint that holds more.
      layout: `linen` or `nnx` for a checkpoint of another writer; None to find out.
      beside: names of trees that are not the model's in a checkpoint of another writer: a field of
        a `TrainState` looks like a collection if it holds a tree.

    Raises:
      CheckpointNotFoundError: there is no checkpoint.
      CheckpointError: it cannot be read, or was replaced each time, or one of several processes,
        which would begin again by itself, found it replaced.
    """
    for _ in range(_TRIES if jax.process_count() == 1 else 1):
        with reported("no checkpoint can be read at", path):
            found = find(path)
        before = _identity_of(found.path)
        try:
            made = read(_open(found, within, layout, beside))
        except Exception:
            # If it was replaced, this comes of it.
            if _identity_of(found.path) == before:
                raise
        else:
            if _identity_of(found.path) == before:
                return made
    raise CheckpointError(
        "another program replaced or removed, while it was read, the checkpoint at",
        path,
        "Read it again. Nothing was changed in memory.",
    )


def _identity_of(path: Any) -> tuple[int, ...] | None:
    """What tells a directory or file from the one that takes its name; None in an object store."""
    try:
        found = os.stat(os.fspath(path))
    except OSError:
        return None
    # The system gives the number of a directory that was deleted to a new one.
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _open(
    found: Found, within: Key | Sequence[Key], layout: str | None, beside: Collection[str]
) -> Source:
    keys = within if isinstance(within, list | tuple) else (within,)
    if layout not in (None, *_single_files.LAYOUTS):
        remedy = f"Give one of {_single_files.LAYOUTS}, or None."
        raise CheckpointError(f"there is no layout {layout!r} for", found.path, remedy)
    if found.format == "bridge" and (keys or layout is not None):
        raise CheckpointError(
            "layout= and within= are for other writers' checkpoints, not for the bridge's at",
            found.path,
            "It records its layout and has one model; its other trees are restored through extra=."
            " Leave out layout= and within=.",
        )
    try:
        if found.format == "bridge":
            return _bridge_source(found.path)
        return _foreign_source(found, tuple(map(str, keys)), layout, beside)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            "there is a checkpoint that cannot be read at",
            found.path,
            "It is damaged or incomplete; restore an earlier one. Nothing was changed in memory.",
            unreadable=[(str(found.path), reason(error))],
        ) from error


def _bridge_source(path: Any) -> Source:
    notes = _notes.read(path)
    trees: dict[str, tuple[Any, Any]] = {}
    for name, records in notes.items.items():
        arrays = {names: s for names, s in stored_in(records).items() if s.is_read}
        trees[name] = path / name, nest(arrays)
    extra = {name: records for name, records in notes.items.items() if name != VARIABLES}
    variables, written_by = notes.items[VARIABLES], notes.written_by
    return Source(path, "orbax", "bridge", variables, extra, trees, {}, written_by, notes.is_intact)


def _foreign_source(
    found: Found, within: Names, given: str | None, beside: Collection[str]
) -> Source:
    if found.format in _single_files.FORMATS:
        content = _single_files.read(found.path, found.format)
        trees, values = {}, dict(parts(content))
        entries = {
            p: dataclasses.replace(describe(value), location=p) for p, value in values.items()
        }
        noted = _single_files.noted_layout(found.path, found.format)
    else:
        with quiet_orbax():
            metadata: Any = ocp.PyTreeCheckpointHandler().metadata(found.path)
        tree = jax.tree_util.tree_map_with_path(
            lambda keys, leaf: _described(leaf, tuple(map(key_of, keys))),
            getattr(metadata, "tree", metadata),
            is_leaf=lambda leaf: isinstance(leaf, ocp.metadata.value.Metadata),
        )
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Stored))
        entries = {stored.location: stored for stored in leaves}
        trees, values, noted = {"": (found.path, tree)}, {}, None
    named = {tuple(map(str, location)): stored for location, stored in entries.items()}
    main = {n[len(within) :]: s for n, s in named.items() if n[: len(within)] == within}
    if within and not main:
        raise _nothing_within(found.path, named, within)
    # A lone array has no keys; a tree without leaves is a Linen model's without variables.
    by_keys = _layout({names[0] if names else "" for names in main})
    if noted == "linen" and not within:
        by_keys = noted
    else:
        given = given or noted
    is_alone = by_keys == "nnx" and (
        given == "linen" or (given is None and _are_params_alone(main, found.format, within))
    )
    layout = "linen" if is_alone else given or by_keys
    if layout == "linen" and not is_alone:
        others = _NOT_VARIABLES.union(() if within else beside)
        main = {n: s for n, s in main.items() if len(n) > 1 and n[0] not in others}
    # Of an NNX state any tree of its own may be asked for.
    is_whole = layout == "linen" and not within
    of_model = {names[0] for names in main} if is_whole else set(within[:1])
    tops = {names[0] for names in named if names} - of_model
    if is_alone:
        main = {("params", *names): stored for names, stored in main.items()}
    extra = {
        top: _records({n[1:]: s for n, s in named.items() if n[0] == top}) for top in sorted(tops)
    }
    model = _records(main)
    return Source(
        found.path,
        found.format,
        layout,
        model,
        extra,
        trees,
        values,
        is_params_alone=is_alone,
    )


def _are_params_alone(leaves: Collection[Names], form: str, within: Names) -> bool:
    """Whether leaves are the parameters alone, as `to_bytes(state.params)` writes them.

    An NNX state has what parameters do not: the key `value` of each Variable, statistics and
    streams. A tree that holds more than a model has `params` further down. Without any such sign, a
    single file or a tree called `params` is taken for parameters. A directory of orbax is only if
    Linen made its names, and no key is a number, as those of a list are. In a file numbers are no
    sign: models of Hugging Face have them (`h/0/attn`). `within` has the keys that lead to the
    tree.
    """
    keys = {key for names in leaves for key in names}
    last = {names[-1] for names in leaves if names}
    is_other = (
        last <= {"value"}
        or bool(last & {"mean", "var"})
        or any("params" in names[1:-1] for names in leaves)
        or any((*names[:-1], "count") in leaves for names in leaves if names[-1:] == ("key",))
    )
    if is_other or not keys or () in leaves:
        return False
    if form != "orbax" or within[-1:] == ("params",):
        return True
    return any(map(_AUTOMATIC.fullmatch, keys)) and not any(key.isdecimal() for key in keys)


def _nothing_within(path: Any, named: Iterable[Names], within: Names) -> CheckpointNotFoundError:
    depth, inside = departure(within, named)
    place = f"within {'/'.join(within[:depth])} " if depth else ""
    question = did_you_mean(within[depth], inside)
    remedy = f"The keys {place}there are {listed(sorted(inside))}. {question}".rstrip()
    return CheckpointNotFoundError(f"there is nothing within {'/'.join(within)!r} in", path, remedy)


def departure(path: Path, known: Iterable[Path]) -> tuple[int, list[str]]:
    """At which of its keys a path leaves others, and what these have in the place of that key."""
    depth, below = 0, list(known)
    while inside := [own for own in below if own[: depth + 1] == path[: depth + 1]]:
        depth, below = depth + 1, inside
    return depth, list(dict.fromkeys(own[depth] for own in below if len(own) > depth))


def _layout(tops: set[str]) -> str:
    """Whether the first keys are those of Linen variables or of an NNX state."""
    is_linen = "params" in tops or all(map(_is_collection, tops - _NOT_VARIABLES))
    return "linen" if is_linen else "nnx"


def _is_collection(name: str) -> bool:
    try:
        found = registry.variable_type_from_name(name)
    except registry.UnknownNameError:
        return False
    # A type that was made on demand says nothing about the file.
    return registry.auto.collection_of(found) is None


def _records(stored: Mapping[Names, Stored]) -> list[Record]:
    return [Record(names, {names: entry}, 0) for names, entry in stored.items()]


def _described(leaf: Any, location: Location) -> Stored:
    """What orbax says of a leaf."""
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return Stored("str", (), "str", location=location)
    dtype = jax.numpy.dtype(leaf.dtype)
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        kind = {"i": "int", "f": "float", "b": "bool"}[dtype.kind]
        return Stored(kind, (), kind, location=location)
    kind = "jax" if leaf.sharding else "numpy"
    return Stored(kind, tuple(leaf.shape), str(dtype), location=location)
