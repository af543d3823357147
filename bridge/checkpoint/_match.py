"""Compares a checkpoint with a target: everything that does not fit, at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from bridge._conversion.matching import shape_text
from bridge._conversion.neutral import Leaf, Path
from bridge._errors import CheckpointError
from bridge._randomness.typed_keys import is_key, to_bits

from ._renaming import paths_in
from ._source import Source
from ._stored import PYTHON_TYPES, Names, Record, Stored, is_rng, parts, stored_in, tree_text
from ._targets import TargetTree

# For each leaf of a target, the array of the checkpoint for each part of its value.
Taken: TypeAlias = dict[Path, list[tuple[Stored, Any]]]


@dataclasses.dataclass(frozen=True)
class TargetComparison:
    """A checkpoint compared with targets, and everything that does not fit, of all trees.

    Attributes:
      rngs: whether RNG state has to fit; None restores it where both have it.
      allow_missing: whether the target keeps what the checkpoint lacks.
      allow_unexpected: whether what the target lacks is ignored.
      missing: (path, expected).
      mis_shaped: (path, expected, found).
      mis_typed: (path, expected, found).
      unexpected: paths.
    """

    source: Source
    rngs: bool | None
    allow_missing: bool
    allow_unexpected: bool
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    mis_shaped: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    mis_typed: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)

    def match(self, records: Sequence[Record], target: TargetTree, label: str = "") -> Taken:
        """What a target takes out of a tree of the checkpoint.

        Paths in messages begin with `label`.
        """
        stored = stored_in(records)
        taken: Taken = {}
        seen: set[Names] = set()
        for path, own in paths_in(self.source, target).items():
            leaf = target.leaves[path]
            is_stream = target.side != "pytree" and is_rng(path)
            below = parts(leaf.value)
            where = _locate(self.source, own, [keys for keys, _ in below], stored, leaf)
            seen.update(where or ())
            if not below or (is_stream and self.rngs is False):
                continue
            text = label + tree_text(path)
            if where is None:
                is_optional = self.allow_missing or (is_stream and self.rngs is None)
                if not is_optional or any(isinstance(x, jax.ShapeDtypeStruct) for _, x in below):
                    self.missing.append((text, shape_text(leaf.value)))
                continue
            taken[path] = []
            for names, (keys, like) in zip(where, below, strict=True):
                problem = _problem(stored[names], like)
                entry = "/".join([text, *map(str, keys)]), *_texts(like, stored[names])
                if problem is None:
                    taken[path].append((stored[names], like))
                else:
                    (self.mis_shaped if problem == "shape" else self.mis_typed).append(entry)
        for record in records:
            is_left = record.stored and not seen.issuperset(record.stored)
            is_ignored = self.rngs is not True and _is_stream(self.source, record.path, stored)
            if is_left and not is_ignored and not self.allow_unexpected:
                self.unexpected.append(label + tree_text(record.path))
        return taken

    def raise_if_any(self, remedy: str) -> None:
        """Raises CheckpointError with every problem; `remedy` is what is most likely to help."""
        if not (self.missing or self.mis_shaped or self.mis_typed or self.unexpected):
            return
        hints = [remedy] if remedy else []
        if self.missing:
            hints.append(
                "allow_missing=True keeps what the target has where the checkpoint has none."
            )
        if self.unexpected:
            hints.append("allow_unexpected=True ignores what the target does not have.")
        raise CheckpointError(
            "the target does not fit the checkpoint",
            self.source.path,
            " ".join([*hints, "Nothing was changed."]),
            missing=self.missing,
            mis_shaped=self.mis_shaped,
            mis_typed=self.mis_typed,
            unexpected=self.unexpected,
        )


def _locate(
    source: Source, path: Path, below: list[Path], stored: Mapping[Names, Stored], leaf: Leaf
) -> list[Names] | None:
    """The names of every part of a value, None if one is not there."""
    own = source.names(path) if path or source.layout == "bridge" else ()
    prefixes = [own]
    if source.layout != "bridge":
        # Other writers make a box or a Variable a subtree with one key, the name of a field.
        prefixes.append((*own, "value"))
        fields = {n[len(own)] for n in stored if n[: len(own)] == own and len(n) > len(own)}
        if leaf.box is not None and len(fields) == 1:
            prefixes.append((*own, *fields))
    for prefix in prefixes:
        names = [(*prefix, *(source.names(keys) if keys else ())) for keys in below]
        if all(n in stored for n in names):
            return names
    return None


def _is_stream(source: Source, path: Path, stored: Mapping[Names, Stored]) -> bool:
    """Whether a leaf of a checkpoint is RNG state."""
    if source.layout != "nnx":
        return is_rng(path)
    # A state holds only names: recognise a stream by a key and a count side by side.
    bare = path[:-1] if path[-1:] == ("value",) else path
    ending = path[len(bare) :]
    pair = [tuple(map(str, (*bare[:-1], name, *ending))) for name in ("key", "count")]
    is_pair = bare[-1:] in (("key",), ("count",)) and all(names in stored for names in pair)
    return is_pair and stored[pair[1]].dtype == "uint32"


def _problem(stored: Stored, like: Any) -> str | None:
    """Whether the shape or the dtype is another one than the target's."""
    if stored.is_python or type(like) in PYTHON_TYPES.values():
        if stored.shape != np.shape(like):
            return "shape"
        return None if _category(stored.dtype) == _category(_dtype_text(like)) else "dtype"
    if is_key(like) and stored.kind != "key":
        # Other writers store the data of typed keys.
        data = to_bits(like)
        if stored.dtype != str(data.dtype):
            return "dtype"
        return None if stored.shape == data.shape else "shape"
    if stored.shape != np.shape(like):
        return "shape"
    return None if stored.dtype == str(like.dtype) else "dtype"


def _category(dtype: str) -> str:
    if dtype in PYTHON_TYPES:
        return dtype
    kinds = {"int": np.integer, "float": np.floating, "bool": np.bool_}
    try:
        found = jax.numpy.dtype(dtype)
    except TypeError:
        return dtype
    return next((n for n, kind in kinds.items() if jax.numpy.issubdtype(found, kind)), dtype)


def _dtype_text(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__


def _texts(like: Any, stored: Stored) -> tuple[str, str]:
    expected = shape_text(like) if hasattr(like, "shape") else type(like).__name__
    return expected, stored.dtype if stored.is_python else shape_text(stored)
