"""A GraphDef for a cache, with holes in the places of objects that belong to a caller.

A cached GraphDef would keep the functions, configurations and classes alive that its module was
constructed with, and would give one model the objects of another that is equal now.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from flax import linen as nn

from bridge._conversion.held_module import HeldModule
from bridge._fingerprint import Look, is_of_module
from bridge._flax import graphdefs
from bridge._flax.objects import DATA_ATTRIBUTES, OBJECT_STATES, attributes_dict

from .static_graphdef import Origin, StaticGraphDef, with_facts

_Find = Callable[[Any], Any]
# What holds others and is nobody's: it may be shared if all that it holds may be.
_SHARED = (types.FunctionType, types.MethodType, functools.partial, nn.Module, HeldModule)
_SHARED += (enum.Enum, graphdefs.IndexesPytreeDef, *OBJECT_STATES)


class _CannotBeKeptError(Exception):
    """A GraphDef holds something that may belong to a model."""


@dataclasses.dataclass(frozen=True)
class _Hole:
    """The place of one of the constructor's objects."""

    index: int

    def __call__(self) -> Any:
        """A partial takes nothing that cannot be called."""
        raise NotImplementedError


class Template:
    """A GraphDef without the objects that its module was constructed with.

    Args:
      graphdef: the GraphDef.
      objects: what its module was constructed with (`Look.objects`).

    Raises:
      _CannotBeKeptError: there is anything else in it that must not be kept.
    """

    def __init__(self, graphdef: StaticGraphDef, objects: list[Any]):
        places = {id(value): i for i, value in enumerate(objects) if not is_of_module(value)}
        self._facts = graphdef.avals, graphdef.given
        parts = [*graphdef.nodes, *graphdef.attributes]
        self._parts = _each(parts, functools.partial(_kept, places=places))
        self._split = len(graphdef.nodes)
        self._num_leaves = graphdef.num_leaves
        is_whole = all(map(operator.is_, parts, self._parts))
        self._whole = self._filled([]) if is_whole else None

    @classmethod
    def of(cls, graphdef: StaticGraphDef, objects: list[Any]) -> Template | None:
        """The template of a GraphDef, None if it must not be kept."""
        try:
            return cls(graphdef, objects)
        except (_CannotBeKeptError, RecursionError):
            return None

    def fill(self, objects: list[Any], origin: Origin | None) -> StaticGraphDef:
        """The GraphDef with these objects in the places of those that it was made with."""
        made = self._filled(objects) if self._whole is None else self._whole
        avals, given = self._facts
        return with_facts(made, avals, origin, given)

    def _filled(self, objects: list[Any]) -> StaticGraphDef:
        parts = _each(self._parts, lambda x: objects[x.index] if type(x) is _Hole else x)
        return StaticGraphDef(parts[: self._split], parts[self._split :], self._num_leaves)


def _each(values: Iterable[Any], find: _Find) -> list[Any]:
    return [_replaced(value, find) for value in values]


def _replaced(value: Any, find: _Find) -> Any:
    """A value with what `find` finds for each thing in it; lists, dicts and sets are made anew."""
    kind: Any = type(value)
    if kind is tuple:
        items = _each(value, find)
        return value if all(map(operator.is_, items, value)) else tuple(items)
    if kind in (list, set, frozenset):
        return kind(_each(value, find))
    if kind is dict:
        return dict(zip(_each(value, find), _each(value.values(), find), strict=True))
    if kind is DATA_ATTRIBUTES:
        old = attributes_dict(value)
        new = _replaced(old, find)
        is_same = all(map(operator.is_, new.values(), old.values()))
        return value if is_same else kind(new, copy=False)
    if kind is functools.partial and not value.__dict__:
        old = value.func, value.args, tuple(value.keywords.values())
        func, args, values = _replaced(old, find)
        if all(map(operator.is_, old, (func, args, values))):
            return value
        return functools.partial(func, *args, **dict(zip(value.keywords, values, strict=True)))
    fields = _FIELDS.get(kind)
    if fields:
        old = tuple(getattr(value, name) for name in fields)
        new = _replaced(old, find)
        changed = dict(zip(fields, new, strict=True))
        return value if new is old else dataclasses.replace(value, **changed)
    return value if kind in _MARKS else find(value)


_MARKS = frozenset({graphdefs.NodeAttr, graphdefs.LeafAttr, graphdefs.NodeRef})
_FIELDS = {
    graphdefs.Static: ("value",),
    graphdefs.NodeDef: ("type", "metadata"),
    graphdefs.VariableDef: ("type", "metadata"),
}


def _kept(value: Any, places: dict[int, int]) -> Any:
    """A value that may be kept as it is, or the hole in its place."""
    if id(value) in places:
        return _Hole(places[id(value)])
    if is_of_module(value):
        return value
    for held in Look(value).objects:
        is_shared = isinstance(held, _SHARED) or is_of_module(held)
        if id(held) in places or not is_shared:
            raise _CannotBeKeptError
    return value
