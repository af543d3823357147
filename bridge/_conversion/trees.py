"""Linen variables <-> nested Variables, whole trees at once.

Nearly all leaves of a model are arrays without a box, and nearly all Variables have no metadata of
their own. What such a leaf becomes depends on its type and on its collection alone; any other leaf
goes through its neutral form, and so does a whole tree in which the paths of two collections
collide. Leaf by leaf, a conversion takes nine times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import config
from flax.core import freeze
from jax.core import Tracer

import registry
from bridge._flax.variables import REQUIRED_METADATA, variable_maker
from bridge._types import DICT, VARIABLE, Variables

from . import linen_leaves, nnx_leaves
from .collections import ARRAYS, STATIC
from .neutral import Key, Path, Tree, is_mapping, nest, walk
from .nnx_leaves import LeafOf, StateItem
from .own_leaves import without_static


def nnx_tree(
    variables: Variables,
    *,
    all_variables: bool = False,
    convert: Callable[[object], object] | None = None,
) -> Tree:
    """Nested dicts with a Variable for every leaf of Linen variables.

    Args:
      variables: Linen variables, as `linen_leaves.check_collections` wants them.
      all_variables: as for `nnx_leaves.to_leaves`.
      convert: what is done to a value that is no JAX array.

    Raises:
      ConversionError: a leaf is a Variable.
      UnsupportedBoxError: a box cannot be carried.
    """
    active = registry.current()
    root: Tree = {}
    for name in sorted(variables, key=lambda name: (name != "params", name)):
        tree = without_static(variables[name]) if name == STATIC else variables[name]
        if not tree and name == STATIC:
            continue
        planting = _Planting(name, active, name == ARRAYS and not all_variables, convert)
        # An empty collection is a leaf without a path of its own.
        if not tree or not planting.plant(tree, root, ()):
            return _placed(variables, all_variables, convert)
    return root


def _placed(
    variables: Variables, all_variables: bool, convert: Callable[[object], object] | None
) -> Tree:
    """`nnx_tree` leaf by leaf, each in its place."""
    linen_leaves.check_variables(variables)
    neutral = linen_leaves.from_variables(variables)
    if convert:
        neutral = {a: leaf._replace(value=convert(leaf.value)) for a, leaf in neutral.items()}
    return nest(nnx_leaves.to_leaves(neutral, all_variables=all_variables))


class _Planting:
    """How the leaves of one collection become Variables, or stay arrays if they are `bare`."""

    def __init__(
        self,
        collection: str,
        active: registry.Registry,
        bare: bool,
        convert: Callable[[object], object] | None,
    ):
        self._collection = collection
        self._active = active
        self._bare = bare
        self._convert = convert
        self._type = active.type_from_name(collection)
        make = variable_maker(self._type, nnx_leaves.bare_metadata())
        self._make: Callable[[Any], Any] = _itself if bare else make

    def plant(self, tree: Mapping[Key, Any], node: Tree, path: Path) -> bool:
        """Puts the leaves of a subtree into `node`; False if the place of one is taken."""
        for key, value in tree.items():
            is_mapped = is_mapping(type(value))
            if is_mapped and value:
                below = node.setdefault(key, {})
                if not isinstance(below, DICT) or not self.plant(value, below, (*path, key)):
                    return False
            elif key in node:
                return False
            elif not is_mapped and _is_array(type(value)):
                node[key] = self._make(value)
            else:
                node[key] = self._item((*path, key), {} if is_mapped else value)
        return True

    def _item(self, path: Path, value: object) -> object:
        """Any leaf as what it is in a State."""
        if isinstance(value, VARIABLE):
            raise linen_leaves.is_nnx(value)
        leaf = linen_leaves.to_leaf(self._collection, path, value, self._active)
        if self._convert:
            leaf = leaf._replace(value=self._convert(leaf.value))
        if self._bare and leaf.box is None and not leaf.is_empty:
            return leaf.value
        return nnx_leaves.from_leaf(self._type, leaf)


def _is_array_type(kind: type) -> bool:
    # A tracer may be a Variable.
    return issubclass(kind, jax.Array | jax.ShapeDtypeStruct) and not issubclass(kind, Tracer)


_is_array: Callable[[Any], bool] = functools.lru_cache(maxsize=1024)(_is_array_type)


def _itself(value: object) -> object:
    return value


def linen_tree(tree: Mapping[Key, Any], leaf_of: LeafOf = nnx_leaves.item_leaf) -> Variables:
    """The inverse of `nnx_tree`: variables by collection.

    Args:
      tree: a State, or nested mappings, with Variables and bare arrays at the leaves.
      leaf_of: as for `nnx_leaves.from_leaves`.

    Returns:
      A dict, or a FrozenDict if Flax's `flax_return_frozendict` is on.

    Raises:
      ConversionError: a module among the leaves, or two Variables for one place.
      RegistrationConflictError: two unregistered Variable types have the same name.
    """
    gathering = _Gathering(registry.current(), leaf_of)
    # The items of a State itself are made one by one.
    found = gathering.gather(getattr(tree, "raw_mapping", tree), ())
    if gathering.has_displaced:
        return linen_leaves.to_variables(nnx_leaves.from_leaves(walk(tree), leaf_of))
    return freeze(found) if config.flax_return_frozendict else found


class _Gathering:
    """How Variables become leaves of Linen variables.

    Attributes:
      has_displaced: whether a Variable was not at its own path, and was passed over.
    """

    def __init__(self, active: registry.Registry, leaf_of: LeafOf):
        self.has_displaced = False
        self._active = active
        self._leaf_of = leaf_of
        self._kind: Callable[[Any], str | bool | None] = functools.cache(
            functools.partial(_kind, active)
        )

    def gather(self, tree: Mapping[Key, Any], path: Path) -> Tree:
        """The leaves of a subtree by collection."""
        found: Tree = {}
        for key, item in tree.items():
            kind = self._kind(type(item))
            if kind is True:
                # A subtree has one leaf at least, or it is not there.
                for collection, below in self.gather(item, (*path, key)).items():
                    found.setdefault(collection, {})[key] = below
                continue
            if kind:
                metadata, value = item.get_metadata(), item.get_raw_value()
                if metadata.keys() == REQUIRED_METADATA and not is_mapping(type(value)):
                    found.setdefault(kind, {})[key] = value[...] if metadata["ref"] else value
                    continue
            self._gather_other((*path, key), item, found)
        return found

    def _gather_other(self, path: Path, item: StateItem, found: Tree) -> None:
        collection, own_path = nnx_leaves.address_of(path, item, self._active)
        if own_path is not path:
            self.has_displaced = True
        elif (leaf := self._leaf_of(path, item, self._active)) is not None:
            value = linen_leaves.from_leaf(collection, leaf, self._active)
            found.setdefault(collection, {})[path[-1]] = value


def _kind(active: registry.Registry, kind: type) -> str | bool | None:
    """The collection of a Variable type, True for a mapping, None for anything else."""
    if is_mapping(kind):
        return True
    if not issubclass(kind, VARIABLE):
        return None
    name = active.name_from_type(kind)
    # A bare value in that collection would come back without its Variable.
    return None if name == ARRAYS else name
