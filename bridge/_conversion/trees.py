"""Linen variables <-> nested Variables, whole trees at once.

Nearly all leaves of a model are arrays without a box, and nearly all Variables have no metadata of
their own. What such a leaf becomes depends on its type and on its collection alone, which are
looked at once in each conversion; any other leaf goes through its neutral form, and so does a whole
tree in which the paths of two collections collide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from .neutral import Key, Neutral, Path, is_mapping, nest, walk
from .own_leaves import without_static

Tree: TypeAlias = dict[Key, Any]


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
    for name in sorted(variables, key=lambda name: (name != "params", name)):
        tree = without_static(variables[name]) if name == STATIC else variables[name]
        if not tree and name == STATIC:
            continue
        collection = _Collection(variables, name, active, all_variables, convert)
        # An empty collection is a leaf without a path of its own.
        if not tree or not collection.plant(tree, root, ()):
            return _placed(variables, all_variables, convert)
    return root


def _placed(
    variables: Mapping[str, Any], all_variables: bool, convert: Callable[[Any], Any] | None
) -> Tree:
    """`nnx_tree` leaf by leaf, each in its place."""
    linen_leaves.check_variables(variables)
    neutral = linen_leaves.from_variables(variables)
    if convert:
        neutral = {a: leaf._replace(value=convert(leaf.value)) for a, leaf in neutral.items()}
    return nest(nnx_leaves.to_leaves(neutral, all_variables=all_variables))


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
        self._name = name
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

    def plant(self, tree: Mapping[Key, Any], node: Tree, path: Path) -> bool:
        """Puts the leaves of a subtree into `node`; False if the place of one is taken."""
        plain, kinds = self._plain, self._kinds
        for key, value in tree.items():
            kind = kinds.get(type(value)) or self._kind(type(value))
            if kind == _MAPPING and value:
                below = node.setdefault(key, {})
                if type(below) is not dict or not self.plant(value, below, (*path, key)):
                    return False
            elif key in node:
                return False
            elif kind == _PLAIN:
                node[key] = plain(value)
            else:
                node[key] = self._item((*path, key), {} if kind == _MAPPING else value)
        return True

    def _item(self, path: Path, value: Any) -> Any:
        """Any leaf as what it is in a State."""
        if isinstance(value, nnx.Variable):
            raise linen_leaves.is_nnx(self._variables)
        leaf = linen_leaves.to_leaf(self._name, path, value, self._active)
        if self._convert:
            leaf = leaf._replace(value=self._convert(leaf.value))
        if self._is_bare and leaf.box is None and not leaf.is_empty:
            return leaf.value
        return nnx_leaves.from_leaf(self._type, leaf)

    def _kind(self, typ: type) -> int:
        # A tracer may be a Variable.
        is_plain = issubclass(typ, self._plain_types) and not issubclass(typ, Tracer)
        kind = _MAPPING if is_mapping(typ) else _PLAIN if is_plain else _OTHER
        self._kinds[typ] = kind
        return kind


_PLAIN, _MAPPING, _OTHER = 1, 2, 3


def _itself(value: Any) -> Any:
    return value


def linen_tree(
    tree: Mapping[Key, Any], *, held: Callable[[], Neutral] | None = None
) -> Mapping[str, Any]:
    """The inverse of `nnx_tree`: variables by collection.

    Args:
      tree: a State, or nested mappings, with Variables and bare arrays at the leaves.
      held: the leaves of these, if they are attributes of a ToNNX. Then anything but Variables in
        dicts is passed over, all of them are Linen's, and boxes are of the types that they were.

    Returns:
      A dict, or a FrozenDict if Flax's `flax_return_frozendict` is on.

    Raises:
      ConversionError: a module among the leaves, or two Variables for one place.
      RegistrationConflictError: two unregistered Variable types have the same name.
    """
    reading = _Reading(registry.current(), held is not None)
    found = reading.gather(tree, ())
    if reading.has_displaced:
        neutral = held() if held else nnx_leaves.from_leaves(walk(tree))
        return linen_leaves.to_variables(neutral)
    return freeze(found) if config.flax_return_frozendict else found


class _Reading:
    """How Variables become leaves of Linen variables.

    Args:
      active: the registry in force.
      is_held: whether the Variables are attributes of a ToNNX.

    Attributes:
      has_displaced: whether a Variable was not at its own path, and was passed over.
    """

    def __init__(self, active: registry.Registry, is_held: bool):
        self.has_displaced = False
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
        if own_path is not path:
            self.has_displaced = True
            return
        if self._is_held:
            leaf = nnx_leaves.to_leaf(item, self._active, boxed_as_is=True)
        else:
            leaf = nnx_leaves.item_leaf(path, item, self._active)
        value = linen_leaves.from_leaf(collection, leaf, self._active)
        found.setdefault(collection, {})[path[-1]] = value

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
