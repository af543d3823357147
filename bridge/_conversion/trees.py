"""Linen variables <-> nested Variables, whole trees at once.

Nearly all leaves of a model are arrays without a box, and nearly all Variables have no metadata of
their own. What such a leaf becomes depends on its type and on its collection alone, which are
looked at once in each conversion; any other leaf goes through its neutral form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import config, nnx
from flax.core import freeze
from jax.core import Tracer

import registry
from bridge._flax.variables import REQUIRED_METADATA, variable_maker

from . import linen_leaves, nnx_leaves
from .collections import ARRAYS, STATIC
from .neutral import Displaced, Leaf, Path, is_mapping, nest, place_beside, put_leaf, walk
from .own_leaves import without_static

Tree: TypeAlias = dict[Any, Any]
# A leaf of Linen variables whose place is taken.
_Colliding: TypeAlias = "tuple[_Collection, Path, Any]"


def nnx_tree(
    variables: Mapping[str, Any],
    *,
    all_variables: bool = False,
    convert: Callable[[Any], Any] | None = None,
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
    colliding: list[_Colliding] = []
    for name in sorted(variables, key=lambda name: (name != "params", name)):
        tree = without_static(variables[name]) if name == STATIC else variables[name]
        if not tree and name == STATIC:
            continue
        collection = _Collection(variables, name, active, all_variables, convert)
        if tree:
            collection.plant(tree, root, (), colliding)
        else:
            colliding.append((collection, (), {}))
    for collection, path, value in sorted(colliding, key=_by_address):
        target, displaced = place_beside(root, collection.name, path)
        put_leaf(root, target, collection.item(path, value, displaced))
    return root


def _by_address(colliding: _Colliding) -> tuple[str, ...]:
    collection, path, _ = colliding
    return collection.name, *map(str, path)


class _Collection:
    """How the leaves of one collection become Variables; the arguments are those of `nnx_tree`."""

    def __init__(
        self,
        variables: Mapping[str, Any],
        name: str,
        active: registry.Registry,
        all_variables: bool,
        convert: Callable[[Any], Any] | None,
    ):
        self.name = name
        self._variables = variables
        self._active = active
        self._convert = convert
        self._type = active.type_from_name(name)
        self._is_bare = name == ARRAYS and not all_variables
        make = variable_maker(self._type, nnx_leaves.bare_metadata())
        self._plain = _itself if self._is_bare else make
        arrays = (jax.Array, jax.ShapeDtypeStruct)
        self._plain_types = arrays if convert else (*arrays, np.ndarray)
        # By type of value: whether it is such an array, a mapping, or something else.
        self._kinds: dict[type, int] = {}

    def plant(
        self, tree: Mapping[Any, Any], node: Tree, path: Path, colliding: list[_Colliding]
    ) -> None:
        """Puts the leaves of a subtree into `node`, or into `colliding` if their place is taken."""
        plain, kinds = self._plain, self._kinds
        for key, value in tree.items():
            kind = kinds.get(type(value)) or self._kind(type(value))
            if kind == _MAPPING and value:
                below = node.setdefault(key, {})
                if type(below) is dict:
                    self.plant(value, below, (*path, key), colliding)
                else:
                    leaves = walk(value, empty=True)
                    colliding += [(self, (*path, key, *rest), leaf) for rest, leaf in leaves]
            elif key in node:
                leaf = {} if kind == _MAPPING else value
                colliding.append((self, (*path, key), leaf))
            elif kind == _PLAIN:
                node[key] = plain(value)
            else:
                node[key] = self.item((*path, key), {} if kind == _MAPPING else value)

    def item(self, path: Path, value: Any, displaced: Displaced | None = None) -> Any:
        """Any leaf as what it is in a State."""
        if isinstance(value, nnx.Variable):
            raise linen_leaves.is_nnx(self._variables)
        leaf = linen_leaves.to_leaf(self.name, path, value, self._active)
        if self._convert:
            leaf = leaf._replace(value=self._convert(leaf.value))
        if self._is_bare and displaced is None and leaf.box is None and not leaf.is_empty:
            return leaf.value
        return nnx_leaves.from_leaf(self._type, leaf, displaced)

    def _kind(self, typ: type) -> int:
        # A tracer may be a Variable.
        is_plain = issubclass(typ, self._plain_types) and not issubclass(typ, Tracer)
        kind = _MAPPING if is_mapping(typ) else _PLAIN if is_plain else _OTHER
        self._kinds[typ] = kind
        return kind


_PLAIN, _MAPPING, _OTHER = 1, 2, 3


def _itself(value: Any) -> Any:
    return value


def linen_tree(tree: Mapping[Any, Any], *, is_held: bool = False) -> Any:
    """The inverse of `nnx_tree`: variables by collection.

    Args:
      tree: a State, or nested mappings, with Variables and bare arrays at the leaves.
      is_held: whether these are attributes of a ToNNX. Then anything but Variables in dicts is
        passed over, all of them are Linen's, and boxes are of the types that they were.

    Returns:
      A dict, or a FrozenDict if Flax's `flax_return_frozendict` is on.

    Raises:
      ConversionError: a module among the leaves, or two Variables for one place.
      RegistrationConflictError: two unregistered Variable types have the same name.
    """
    reading = _Reading(registry.current(), is_held)
    found = reading.gather(tree, ())
    if reading.displaced:
        found = _with_displaced(found, reading.displaced)
    return freeze(found) if config.flax_return_frozendict else found


def _with_displaced(found: Tree, displaced: Iterable[tuple[str, Path, Any]]) -> Tree:
    # A subtree has leaves, so an empty dict is a leaf.
    flat = dict(walk(found, empty=True)) if found else {}
    for collection, path, leaf in displaced:
        if (collection, *path) in flat:
            raise nnx_leaves.two_at(collection, path)
        flat[collection, *path] = leaf
    return nest(flat)


class _Reading:
    """How Variables become leaves of Linen variables.

    Args:
      active: the registry in force.
      is_held: as for `linen_tree`.

    Attributes:
      displaced: (collection, path, leaf) of Variables that are not at their own path.
    """

    def __init__(self, active: registry.Registry, is_held: bool):
        self.displaced: list[tuple[str, Path, Any]] = []
        self._active = active
        self._is_held = is_held
        # By type: the collection of a Variable, True for a mapping, None for anything else.
        self._kinds: dict[type, str | bool | None] = {}
        # By type of value: whether it may be a leaf of Linen variables as it is.
        self._values: dict[type, bool] = {}

    def gather(self, tree: Mapping[Any, Any], path: Path) -> Tree:
        """The leaves of a subtree by collection."""
        found: Tree = {}
        kinds, values = self._kinds, self._values
        # The items of a State itself are made one by one.
        items: Mapping[Any, Any] = tree.raw_mapping if type(tree) is nnx.State else tree
        item: Any
        for key, item in items.items():
            typ = type(item)
            kind = kinds[typ] if typ in kinds else self._kind(typ)
            if kind is True:
                # A subtree has one leaf at least, or it is not there.
                for collection, below in self.gather(item, (*path, key)).items():
                    found.setdefault(collection, {})[key] = below
                continue
            if kind:
                metadata = item.get_metadata()
                if metadata.keys() == REQUIRED_METADATA:
                    value = item.get_raw_value()
                    if metadata["ref"]:
                        value = value[...]
                    if values.get(type(value)) or self._is_value(type(value)):
                        node = found.get(kind)
                        if node is None:
                            node = found[kind] = {}
                        node[key] = value
                        continue
            self._gather_other((*path, key), item, found)
        return found

    def _gather_other(self, path: Path, item: Any, found: Tree) -> None:
        if self._is_held and not isinstance(item, nnx.Variable):
            return
        collection, own_path = nnx_leaves.address_of(path, item, self._active)
        leaf = self._leaf(path, item)
        value = linen_leaves.from_leaf(collection, leaf, self._active)
        if own_path is path:
            found.setdefault(collection, {})[path[-1]] = value
        else:
            self.displaced.append((collection, own_path, value))

    def _leaf(self, path: Path, item: Any) -> Leaf:
        if self._is_held:
            return nnx_leaves.to_leaf(item, self._active, boxed_as_is=True)
        return nnx_leaves.item_leaf(path, item, self._active)

    def _kind(self, typ: type) -> str | bool | None:
        kind = None
        if issubclass(typ, dict) if self._is_held else is_mapping(typ):
            kind = True
        elif issubclass(typ, nnx.Variable):
            name = self._active.name_from_type(typ)
            # A bare value in that collection would come back without its Variable.
            kind = None if name == ARRAYS else name
        self._kinds[typ] = kind
        return kind

    def _is_value(self, typ: type) -> bool:
        self._values[typ] = not is_mapping(typ)
        return self._values[typ]
