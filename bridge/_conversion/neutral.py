"""The neutral form: every leaf of a model by (collection, path).

Whatever passes the boundary becomes ``{(collection, path): Leaf(value, box type, fields)}``. A leaf
is anything that is neither a mapping nor a metadata box, so the tuples that `sow` makes stay whole;
an empty mapping is a leaf as well, so that empty collections survive.

NNX has no collections: a leaf only has a path there. `place` decides where leaves go if their paths
collide, and `unplace` undoes it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from bridge._errors import ConversionError
from bridge._types import DICT
from bridge._types import Address as Address
from bridge._types import Key as Key
from bridge._types import Path as Path

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Leaf(NamedTuple):
    """One value on its way across the boundary.

    Attributes:
      value: an array, an abstract array or any pytree that is not a mapping.
      box: the type of the metadata box around it, None for a bare value.
      fields: what the box says besides the value, in the names of Variable metadata.
    """

    value: Any
    box: type | None = None
    fields: Mapping[str, Any] = NO_FIELDS

    @property
    def is_empty(self) -> bool:
        """Whether this stands for an empty collection or an empty subtree."""
        return self.box is None and is_mapping(type(self.value))


Neutral: TypeAlias = dict[Address, Leaf]
Tree: TypeAlias = dict[Key, Any]


# In a tree of nested dicts, what is not a dict is a leaf.
_LEAF = object()


def _meeting_point(tree: Tree, path: Path) -> int | None:
    """The index of the key at which a path meets a leaf or a subtree; None if it is free."""
    node = tree
    for index, key in enumerate(path):
        if key not in node:
            return None
        below = node[key]
        if not isinstance(below, DICT):
            return index
        node = below
    # A leaf cannot be at the root.
    return max(len(path) - 1, 0)


def _take(tree: Tree, path: Path) -> None:
    """Puts a leaf at a free path of a tree."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = _LEAF


class Displaced(NamedTuple):
    """Says that a collection's name was put into a leaf's path.

    `length` keys of the path come after it. The tree may be part of another one by now, so they are
    counted from the end.
    """

    length: int


def place(
    addresses: Iterable[Address], occupied: Iterable[Path] = ()
) -> dict[Address, tuple[Path, Displaced | None]]:
    """Where leaves go in a tree that has no collections.

    A leaf stays at its path unless that collides with another one: the same path, or one of the two
    above the other. Then `params` keeps the place, or the first collection in alphabetical order,
    and the other leaf goes below its collection's name, at the point where the two meet. The order
    of the leaves does not matter.

    `occupied` has the paths of leaves that are already there. For each address, the result has the
    path in the tree and, if the leaf was moved, how to find its own path in it.
    """
    taken: Tree = {}
    for path in occupied:
        _take(taken, path)
    placed: dict[Address, tuple[Path, Displaced | None]] = {}
    colliding: list[Address] = []
    by_collection: dict[str, list[Path]] = {}
    for collection, path in addresses:
        by_collection.setdefault(collection, []).append(path)
    for collection in sorted(by_collection, key=lambda c: (c != "params", c)):
        for path in by_collection[collection]:
            if _meeting_point(taken, path) is None:
                _take(taken, path)
                placed[collection, path] = path, None
            else:
                colliding.append((collection, path))
    for collection, path in sorted(colliding, key=lambda a: (a[0], *map(str, a[1]))):
        target, displaced = _place_beside(taken, collection, path)
        _take(taken, target)
        placed[collection, path] = target, displaced
    return placed


def _place_beside(tree: Tree, collection: str, path: Path) -> tuple[Path, Displaced]:
    """Where a leaf of a collection goes if its path in a tree is taken; see `place`."""
    # At the point of the collision, so that a part of a tree is placed as the whole tree is.
    index = _meeting_point(tree, path) or 0
    # A leaf with the collection's own name may block the path below it.
    heads = (collection + "_" * n for n in itertools.count())
    targets = ((*path[:index], head, *path[index:]) for head in heads)
    target = next(t for t in targets if _meeting_point(tree, t) is None)
    return target, Displaced(len(path) - index)


def unplace(path: Path, displaced: Displaced | None) -> Path:
    """The path that a leaf had before `place`; the inverse of it."""
    if displaced is None:
        return path
    own = len(path) - displaced.length
    return path[: own - 1] + path[own:]


def nest(flat: Mapping[Path, Any]) -> Tree:
    """Nested dicts from leaves by non-empty path.

    Raises ConversionError if a leaf lies above another one.
    """
    nested: Tree = {}
    own: set[int] = {id(nested)}
    for path, value in flat.items():
        node = nested
        for key in path[:-1]:
            if key not in node:
                node[key] = {}
                own.add(id(node[key]))
            node = node[key]
            if id(node) not in own:
                raise ConversionError(f"there is a leaf above {'/'.join(map(str, path))}")
        if path[-1] in node:
            raise ConversionError(f"there is another leaf at or below {'/'.join(map(str, path))}")
        node[path[-1]] = value
    return nested


def laid_over(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merges nested mappings into new dicts; `new` wins at a leaf."""
    merged = dict(old)
    for key, value in new.items():
        below: Any = merged.get(key)
        if is_mapping(type(below)) and is_mapping(type(value)):
            merged[key] = laid_over(below, value)
        else:
            merged[key] = value
    return merged


def walk(tree: Mapping[Any, Any], *, empty: bool = False) -> list[tuple[Path, Any]]:
    """(path, leaf) of nested mappings, such as a State or a collection.

    With `empty`, an empty mapping is a leaf, `{}`.
    """
    found: list[tuple[Path, Any]] = []
    _walk(tree, (), empty, found)
    return found


def by_address(variables: Mapping[str, Any]) -> dict[Address, Any]:
    """Every leaf of Linen variables, boxes included, by (collection, path)."""
    return {
        (collection, path): leaf
        for collection, tree in variables.items()
        for path, leaf in walk(tree)
    }


# Not a generator, which would be one for each level: a ToLinen walks at each call. Nor a function
# inside of `walk`: one that calls itself is garbage only a collection finds, and holds the leaves.
def _walk(tree: Mapping[Any, Any], path: Path, empty: bool, found: list[tuple[Path, Any]]) -> None:
    if empty and not tree:
        found.append((path, {}))
    for key, value in tree.items():
        if is_mapping(type(value)):
            _walk(value, (*path, key), empty, found)
        else:
            found.append(((*path, key), value))


def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


# Whether a type is one of mappings. `isinstance` with an abstract class is slow, and each call
# tests every leaf.
is_mapping: Callable[[Any], bool] = functools.lru_cache(maxsize=1024)(_is_mapping)


def as_dicts(tree: Any) -> Any:
    """Nested mappings as nested dicts of their own; the leaves stay the same objects."""
    return {k: as_dicts(v) for k, v in tree.items()} if is_mapping(type(tree)) else tree
