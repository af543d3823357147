"""A GraphDef for a cache, without the objects that belong to a caller.

A cached GraphDef would keep the functions, configurations and classes alive that its module was
constructed with, and would give one model the objects of another that is equal now.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx

from bridge._conversion.linen_attributes import HeldModule
from bridge._fingerprint import Look, is_of_module
from bridge._flax import graphdefs
from bridge._flax.objects import ObjectState

from .static_graphdef import Origin, StaticGraphDef

# What holds others and is nobody's: it may be shared if all that it holds may be.
_SHARED = (types.FunctionType, types.MethodType, functools.partial, nn.Module, HeldModule)
_SHARED += (enum.Enum, tuple, list, dict, ObjectState)
_SHARED += (graphdefs.NodeDef, graphdefs.VariableDef, graphdefs.ArrayRefDef, graphdefs.NodeRef)
_SHARED += (graphdefs.NodeAttr, graphdefs.LeafAttr, graphdefs.Static)


class _Place(NamedTuple):
    """Stands for the object of a caller, by its number."""

    number: int


class Template:
    """A GraphDef without the objects that its module was constructed with (`Look.objects`).

    Raises ValueError if there is anything else in it that may belong to a model.
    """

    def __init__(self, graphdef: StaticGraphDef, objects: list[Any]):
        own = {id(x): _Place(i) for i, x in enumerate(objects) if not is_of_module(x)}
        self._graphdef = _with_others(graphdef, lambda value: own.get(id(value), value))
        self._facts = graphdef.avals, graphdef.given
        parts = self._graphdef.nodes, self._graphdef.attributes
        for held in Look(parts).objects:
            is_shared = isinstance(held, _SHARED) or _is_plain_set(held)
            if id(held) in own or not (is_shared or is_of_module(held)):
                raise ValueError(held)

    @classmethod
    def of(cls, graphdef: StaticGraphDef, objects: list[Any]) -> Template | None:
        """The template of a GraphDef, None if it must not be kept."""
        try:
            return cls(graphdef, objects)
        except Exception:
            # An object of the user's may raise anything.
            return None

    def fill(self, objects: list[Any], origin: Origin | None) -> StaticGraphDef:
        """The GraphDef with these objects in the places of those that it was made with."""
        avals, given = self._facts
        made = _with_others(
            self._graphdef, lambda value: objects[value.number] if type(value) is _Place else value
        )
        return StaticGraphDef(made, avals, origin, given)


def _with_others(graphdef: nnx.GraphDef[Any], other: Callable[[Any], Any]) -> nnx.GraphDef[Any]:
    """A GraphDef with other objects in its static attributes."""
    attributes: Any = graphdef.attributes
    static = [kind.value for _, kind in attributes if isinstance(kind, graphdefs.Static)]
    values = iter(_within(static, functools.partial(_changed, other)))
    new = [
        (name, graphdefs.Static(next(values)) if isinstance(kind, graphdefs.Static) else kind)
        for name, kind in attributes
    ]
    return nnx.GraphDef(graphdef.nodes, new, graphdef.num_leaves)


def _changed(other: Callable[[Any], Any], value: object) -> Any:
    """A static value with other objects in it, or the value itself if nothing changes."""
    found = other(value)
    if found is not value:
        return found
    # A function that called itself by its name would be a reference cycle.
    changed = functools.partial(_changed, other)
    # A partial that has attributes of its own stays as it is.
    if type(value) is functools.partial and not vars(value):
        parts = value.func, value.args, value.keywords
        func, args, keywords = new = _within(parts, changed)
        return value if new is parts else functools.partial(func, *args, **keywords)
    if isinstance(value, nn.Module | HeldModule):
        names = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
        fields = {name: getattr(value, name) for name in names}
        new = _within(fields, changed)
        return value if new is fields else dataclasses.replace(value, **new)
    return value


def _within(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value with other objects in it, in tuples, lists and dicts too; itself if all stay."""
    changed = other(value)
    kind = type(value)
    if changed is not value or kind not in (tuple, list, dict):
        return changed
    items = [*value, *value.values()] if kind is dict else value
    others = [_within(item, other) for item in items]
    if all(a is b for a, b in zip(others, items, strict=True)):
        return value
    half = len(value)
    return dict(zip(others[:half], others[half:], strict=True)) if kind is dict else kind(others)


def _is_plain_set(value: object) -> bool:
    """Whether a set holds nothing that may belong to a model; `Look` does not tell what it does."""
    is_set = isinstance(value, set | frozenset)
    return is_set and all(isinstance(x, str | int | float) or is_of_module(x) for x in value)
