"""The neutral form: every leaf of a model by (collection, path).

Whatever passes the boundary becomes ``{(collection, path): Leaf(value, box type, fields)}``. A leaf is
anything that is neither a mapping nor a metadata box, so the tuples that `sow` makes stay whole; an
empty mapping is a leaf as well, so that empty collections survive.

NNX has no collections: there a leaf lives at its path alone. `place` decides where leaves go whose
paths collide, and `unplace` undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

Key: TypeAlias = Any
Path: TypeAlias = tuple[Key, ...]
Address: TypeAlias = tuple[str, Path]

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Leaf(NamedTuple):
    """One value on its way across the boundary.

    Attributes:
      value: an array, an abstract array or any pytree that is no mapping.
      box: the type of the metadata box around it, None for a bare value.
      fields: what the box says besides the value, in the names of Variable metadata.
    """

    value: Any
    box: type | None = None
    fields: Mapping[str, Any] = NO_FIELDS

    @property
    def is_empty(self) -> bool:
        """Whether this stands for an empty collection or an empty subtree."""
        return self.box is None and isinstance(self.value, Mapping)


Neutral: TypeAlias = dict[Address, Leaf]


class _Taken(dict[Key, "_Taken"]):
    """Paths as a tree; a node without children is a leaf."""

    def is_free(self, path: Path) -> bool:
        """Whether a leaf at `path` neither meets, nor covers, nor lies below another leaf."""
        node = self
        for key in path:
            if key not in node:
                return node is self or bool(node)
            node = node[key]
        return False

    def take(self, path: Path) -> None:
        node = self
        for key in path:
            node = node.setdefault(key, _Taken())


def place(
    addresses: Iterable[Address], occupied: Iterable[Path] = ()
) -> dict[Address, tuple[Path, int]]:
    """Where leaves go in a tree that has no collections.

    A leaf stays at its path unless that collides with a leaf that came before: the same path, or one of
    the two above the other. Then it goes below its collection's name. `params` comes first, the other
    collections in alphabetical order, whatever the order of the dict they came in.

    Args:
      addresses: (collection, path) of every leaf.
      occupied: paths of leaves that are there already.

    Returns:
      (path in the tree, how many times the collection's name was put in front) by address.
    """
    taken = _Taken()
    for path in occupied:
        taken.take(path)
    placed: dict[Address, tuple[Path, int]] = {}
    by_collection: dict[str, list[Path]] = {}
    for collection, path in addresses:
        by_collection.setdefault(collection, []).append(path)
    for collection in sorted(by_collection, key=lambda c: (c != "params", c)):
        for path in by_collection[collection]:
            target, depth = path, 0
            while not target or not taken.is_free(target):
                target, depth = (collection, *target), depth + 1
            taken.take(target)
            placed[collection, path] = target, depth
    return placed


def unplace(path: Path, depth: int) -> Path:
    """The path that a leaf had before `place` put its collection's name in front `depth` times."""
    return path[depth:]


def nest(flat: Mapping[Path, Any]) -> dict[Key, Any]:
    """Nested dicts from leaves by non-empty path."""
    nested: dict[Key, Any] = {}
    for path, value in flat.items():
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return nested
