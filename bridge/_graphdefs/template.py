"""A GraphDef for a cache, with holes in the places of objects that belong to a caller.

A cached GraphDef would keep the functions, configurations and classes alive that its module was
constructed with, and would give one model the objects of another that is equal now.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from bridge._conversion.held_module import HeldModule
from bridge._equality.code_names import IS_FOUNDATION
from bridge._flax import graphdefs
from bridge._flax.objects import DATA_ATTRIBUTES, OBJECT_STATES

from .static_graphdef import StaticGraphDef, with_facts

_ATOMS = frozenset(
    {int, bool, float, complex, str, bytes, type(None), type(Ellipsis), *OBJECT_STATES}
)
_VALUES = (np.dtype, np.generic, jax.sharding.Sharding, jax.sharding.Mesh, jax.ShapeDtypeStruct)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_Fill = Callable[[list[Any]], Any]


class _CannotBeKeptError(Exception):
    """A GraphDef holds something that may belong to a model."""


class Template:
    """A GraphDef without the objects that its module was constructed with.

    Args:
      graphdef: the GraphDef.
      objects: what its module was constructed with (`Contents.objects`).

    Raises:
      _CannotBeKeptError: there is anything else in it that must not be kept.
    """

    def __init__(self, graphdef: StaticGraphDef, objects: list[Any]):
        places = {id(value): i for i, value in enumerate(objects)}
        self._avals = graphdef.avals
        self._given = graphdef.given
        self._num_leaves = graphdef.num_leaves
        self._nodes = [_node(node, places) for node in graphdef.nodes]
        self._attributes = [_attribute(item, places) for item in graphdef.attributes]
        is_whole = not any(isinstance(part, _Hole) for part in self._nodes + self._attributes)
        self._whole = self._filled([]) if is_whole else None

    @classmethod
    def of(cls, graphdef: StaticGraphDef, objects: list[Any]) -> Template | None:
        """The template of a GraphDef, None if it must not be kept."""
        try:
            return cls(graphdef, objects)
        except _CannotBeKeptError:
            return None

    def fill(self, objects: list[Any], recipe: Any) -> StaticGraphDef:
        """The GraphDef with these objects in the places of those that it was made with."""
        made = self._filled(objects) if self._whole is None else self._whole
        return with_facts(made, self._avals, recipe, self._given)

    def _filled(self, objects: list[Any]) -> StaticGraphDef:
        nodes = [p.fill(objects) if isinstance(p, _Hole) else p for p in self._nodes]
        attributes = [p.fill(objects) if isinstance(p, _Hole) else p for p in self._attributes]
        made = StaticGraphDef(nodes, attributes, self._num_leaves)
        return with_facts(made, self._avals, None, self._given)


class _Hole:
    """A place in a GraphDef.

    Attributes:
      fill: makes from the objects what belongs there.
    """

    def __init__(self, fill: _Fill):
        self.fill = fill


def _node(node: Any, places: Mapping[int, int]) -> Any:
    if not isinstance(node, graphdefs.NodeDef | graphdefs.VariableDef):
        return node
    kind, metadata = _part(node.type, places), _part(node.metadata, places)
    if not isinstance(kind, _Hole) and not isinstance(metadata, _Hole):
        return node
    bare: Any = dataclasses.replace(node, type=None, metadata=None)
    fill_kind, fill_metadata = _filling(kind), _filling(metadata)
    return _Hole(
        lambda objects: dataclasses.replace(
            bare, type=fill_kind(objects), metadata=fill_metadata(objects)
        )
    )


def _attribute(item: tuple[Any, Any], places: Mapping[int, int]) -> Any:
    key, kind = item
    if not isinstance(kind, graphdefs.Static):
        return item
    value = _part(kind.value, places)
    if not isinstance(value, _Hole):
        return item
    return _Hole(lambda objects: (key, graphdefs.Static(value.fill(objects))))


def _filling(part: Any) -> _Fill:
    return part.fill if isinstance(part, _Hole) else lambda objects: part


def _part(value: Any, places: Mapping[int, int]) -> Any:
    """A value that may be kept as it is, or the hole in its place."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _VALUES) or _is_class_to_keep(value):
        return value
    if id(value) in places:
        return _Hole(operator.itemgetter(places[id(value)]))
    if kind in _CONTAINERS or kind is DATA_ATTRIBUTES:
        return _container(value, places)
    if _is_of_module(value) and IS_FOUNDATION[value.__module__]:
        return value
    if kind is functools.partial:
        return _remade(
            lambda parts: functools.partial(parts[0], *parts[1], **parts[2]),
            value,
            (value.func, value.args, value.keywords),
            places,
        )
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        own = (value.__defaults__, value.__kwdefaults__, value.__dict__)
        _require_no_hole([part for part in own if part] + cells, places)
        return value
    if kind is graphdefs.IndexesPytreeDef:
        _require_no_hole([*value.key_index.items(), value.treedef], places)
        return value
    if kind is jax.tree_util.PyTreeDef:
        _require_no_hole([*(value.node_data() or ()), *value.children()], places)
        return value
    if kind is HeldModule:
        # A copy of the module would be another object.
        _require_no_hole([value.module], places)
        return value
    if isinstance(value, nn.Module) and value.scope is None and _is_class_to_keep(kind):
        fields = [getattr(value, name, None) for name in value.__dataclass_fields__]
        _require_no_hole(fields, places)
        return value
    raise _CannotBeKeptError


def _container(value: Any, places: Mapping[int, int]) -> Any:
    kind: Any = type(value)
    made: Any
    if not isinstance(value, Mapping):
        made = kind
        parts: Any = tuple(value)
    else:
        keys = tuple(value)
        _require_no_hole(keys, places)
        parts = tuple(value[key] for key in keys)

        made = _mapping_maker(kind, keys)
    return _remade(made, value, parts, places, is_mutable=kind in (list, set, dict))


def _mapping_maker(kind: Any, keys: tuple[Any, ...]) -> Callable[[Any], Any]:
    if kind is DATA_ATTRIBUTES:
        return lambda values: kind(dict(zip(keys, values, strict=True)), copy=False)
    return lambda values: kind(zip(keys, values, strict=True))


def _remade(
    make: Callable[[Any], Any],
    value: Any,
    parts: tuple[Any, ...],
    places: Mapping[int, int],
    *,
    is_mutable: bool = False,
) -> Any:
    """The value itself if nothing in it has to be replaced."""
    kept = [_part(part, places) for part in parts]
    # Each caller needs its own copy of a mutable value.
    if not is_mutable and not any(isinstance(part, _Hole) for part in kept):
        return value
    fills = [_filling(part) for part in kept]
    return _Hole(lambda objects: make([fill(objects) for fill in fills]))


def _require_no_hole(values: Any, places: Mapping[int, int]) -> None:
    for value in values:
        if isinstance(_part(value, places), _Hole):
            raise _CannotBeKeptError


def _is_class_to_keep(value: Any) -> bool:
    return isinstance(value, type) and (IS_FOUNDATION[value.__module__] or _is_of_module(value))


def _is_of_module(value: Any) -> bool:
    """Whether an imported module holds the value, which keeps it alive anyway."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    home = sys.modules.get(str(getattr(value, "__module__", None)))
    return type(name) is str and home is not None and vars(home).get(name) is value
