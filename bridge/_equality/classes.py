"""What classes and their instances hold, as names and values."""

from __future__ import annotations

import copyreg
import functools
import itertools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flax import nnx

from bridge._flax.objects import OBJECT_STATES

from .code_names import IS_FOUNDATION, uses

# Attributes that Python derives from the rest of a class, or uses internally.
_DERIVED = frozenset(
    """
    __dict__ __weakref__ __doc__ __module__ __qualname__ __slots__ __annotations__ __annotate__
    __annotations_cache__ __annotate_func__ __abstractmethods__ __dataclass_fields__
    __dataclass_params__ __match_args__ __parameters__ __orig_bases__ __static_attributes__
    __firstlineno__ __hash__ __eq__ __repr__ __replace__ __type_params__ _abc_impl
    """.split()  # noqa: SIM905 - a list would take a line for each
)
_METHODS = frozenset(
    {types.FunctionType, staticmethod, classmethod, property, functools.cached_property}
)
_CONSTRUCTING = ("__init__", "__new__", "__post_init__")

# How to read what an object holds as an instance of a built-in type.
_READ: Mapping[type, Any] = {
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    str: str.__str__,
    bytes: bytes.__bytes__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    types.SimpleNamespace: lambda value: None,
    object: lambda value: None,
}


class InstanceParts(NamedTuple):
    """What an object holds.

    Attributes:
      base: what it holds as an instance of a built-in type, None if it is of none.
      attributes: its attributes, in slots and in its dict.
    """

    base: Any
    attributes: Mapping[str, Any]


def class_parts(cls: type, *, calls: bool) -> list[tuple[str, Any]]:
    """What a class holds, with what it inherits.

    Args:
      cls: the class.
      calls: whether all methods of an NNX module count. What only a call uses says nothing about
        the module that is constructed.

    Returns:
      (name, value), the parents' last; and the class of the class.
    """
    bases = [base for base in cls.__mro__ if not IS_FOUNDATION[base.__module__]]
    constructs = not calls and issubclass(cls, nnx.Pytree)
    reachable = _reachable(bases) if constructs else None
    found: list[tuple[str, Any]] = [("", type(cls))]
    for base in bases:
        for name, value in vars(base).items():
            if name in _DERIVED:
                continue
            is_method = type(value) in _METHODS
            if reachable is None or not is_method or name in reachable:
                found.append((name, value))
    return found


def instance_parts(value: Any) -> InstanceParts | None:
    """What an object holds, None if Python cannot tell."""
    cls = type(value)
    noted = _layouts.get(id(cls))
    layout = noted[1] if noted is not None and noted[0]() is cls else _noted(cls)
    if layout.base is None:
        return _reduced(value)
    attributes = {}
    for name, slot in layout.slots:
        # Distinguish an unset slot from one that holds None.
        held = _slot_value(slot, value)
        if held is not _UNSET:
            attributes[name] = held
    own = getattr(value, "__dict__", None) if layout.has_dict else None
    if own:
        attributes |= {k: v for k, v in own.items() if type(v) not in OBJECT_STATES}
    return InstanceParts(_READ[layout.base](value), attributes)


_UNSET = object()


class _Layout(NamedTuple):
    base: type | None
    slots: list[tuple[str, Any]]
    has_dict: bool


# By id: a WeakKeyDictionary lookup makes several Python calls.
_layouts: dict[int, tuple[weakref.ref[type], _Layout]] = {}


def _noted(cls: type) -> _Layout:
    key = id(cls)
    layout = _layout(cls)
    _layouts[key] = weakref.ref(cls, lambda ref: _forget(key, ref)), layout
    return layout


def _forget(key: int, ref: Any) -> None:
    if key in _layouts and _layouts[key][0] is ref:
        del _layouts[key]


def _layout(cls: type) -> _Layout:
    """Where instances keep their contents; without a base if some of it is only visible to C.

    A class of the same slots is made for comparison: if instances need more memory than its, the
    rest holds something else.
    """
    base: Any = next(b for b in cls.__mro__ if b in _READ)
    slots = [
        (name, slot)
        for owner in cls.__mro__
        if owner not in _READ
        for name, slot in vars(owner).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]
    has_dict = cls.__dictoffset__ != 0
    names = [f"s{i}" for i in range(len(slots))]
    names += ["__dict__"] if has_dict and not base.__dictoffset__ else []
    names += ["__weakref__"] if cls.__weakrefoffset__ and not base.__weakrefoffset__ else []
    try:
        like: Any = type("Like", (base,), {"__slots__": tuple(names)})
    except TypeError:
        # Instances of variable size take no slots.
        like = type("Like", (base,), {})
    size = like.__basicsize__, like.__itemsize__
    is_known = cls is base or (cls.__basicsize__, cls.__itemsize__) == size
    return _Layout(base if is_known else None, slots, has_dict)


def _slot_value(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


def _reduced(value: Any) -> InstanceParts | None:
    """What pickle would write of an object that Python's own C code made."""
    cls = type(value)
    reducer = copyreg.dispatch_table.get(cls)
    names = ("__reduce_ex__", "__reduce__")
    owners = (next(b for b in cls.__mro__ if name in vars(b)) for name in names)
    owner = next((o for o in owners if o is not object), None)
    if reducer is None and (owner is None or not IS_FOUNDATION[owner.__module__]):
        return None
    try:
        written = reducer(value) if reducer else value.__reduce_ex__(2)
    except Exception:
        # An object that cannot be pickled may raise anything.
        return None
    if not isinstance(written, tuple):
        return None
    parts = [list(part) if isinstance(part, Iterator) else part for part in written]
    return InstanceParts(tuple(parts), dict(getattr(value, "__dict__", {})))


def _reachable(bases: list[type]) -> set[str]:
    """Names that construction may look up on a module: those that its methods name, and so on."""
    names: set[str] = set(_CONSTRUCTING)
    pending = list(names)
    while pending:
        name = pending.pop()
        for base in bases:
            if name in vars(base):
                for function in _functions(vars(base)[name]):
                    new = set(uses(function.__code__).names) - names
                    names |= new
                    pending += new
    return names


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions that an attribute of a class consists of, none if it is no method."""
    if isinstance(value, types.FunctionType):
        inner = getattr(value, "__wrapped__", None)
        return [value, *_functions(inner)]
    if isinstance(value, staticmethod | classmethod):
        return _functions(value.__func__)
    if isinstance(value, property):
        parts = (value.fget, value.fset, value.fdel)
        return list(itertools.chain.from_iterable(map(_functions, parts)))
    if isinstance(value, functools.cached_property):
        return _functions(value.func)
    return []
