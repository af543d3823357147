"""What a Python object that can be written into holds, and how it is given something else."""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from .code_names import IS_FOUNDATION

# Those that are not the user's classes and can be written into.
_CONTAINERS = frozenset(
    {list, dict, set, bytearray, collections.deque, collections.defaultdict}
    | {collections.OrderedDict, collections.Counter, types.SimpleNamespace, argparse.Namespace}
)
# Code, modules and arrays: they are compared and carried by others.
_CLOSED = (
    type,
    enum.Enum,
    nnx.Pytree,
    nnx.Variable,
    nn.Module,
    jax.Array,
    np.ndarray,
    types.FunctionType,
    types.ModuleType,
)
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
_MISSING = object()


class ObjectContents(NamedTuple):
    """What an object holds.

    Attributes:
      items: as a container.
      attributes: by name.
    """

    items: tuple[Any, ...]
    attributes: Mapping[str, Any]


@functools.lru_cache(maxsize=4096)
def is_fixed(kind: type) -> bool:
    """Whether objects of a type are tuples or alike, whose items may be written into."""
    return kind in (tuple, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_make"))


@functools.lru_cache(maxsize=4096)
def is_writable(kind: type) -> bool:
    """Whether objects of a type may be written into, and Python tells what they hold."""
    if kind in _CONTAINERS:
        return True
    if issubclass(kind, _CLOSED) or _is_of_python(kind):
        return False
    return bool(kind.__dictoffset__ or _slots(kind)) or issubclass(kind, list | dict | set)


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    """The attributes that a user's class has without a dict; those of Python may be read-only."""
    own = (owner for owner in kind.__mro__ if not _is_of_python(owner))
    return tuple(
        name
        for owner in own
        for name, slot in vars(owner).items()
        if isinstance(slot, types.MemberDescriptorType)
    )


def _is_of_python(kind: type) -> bool:
    return kind.__module__ == "builtins" or IS_FOUNDATION[kind.__module__]


@functools.lru_cache(maxsize=4096)
def _derived(kind: type) -> frozenset[str]:
    """The attributes that are computed from others, and kept."""
    return frozenset(
        name
        for owner in kind.__mro__
        for name, value in vars(owner).items()
        if isinstance(value, functools.cached_property)
    )


def held_by(value: Any) -> ObjectContents:
    """What an object holds now."""
    kind = type(value)
    attributes = dict(getattr(value, "__dict__", ()))
    for name in _slots(kind):
        held = getattr(value, name, _MISSING)
        if held is not _MISSING:
            attributes[name] = held
    for name in _derived(kind) & attributes.keys():
        del attributes[name]
    return ObjectContents(tuple(_items(value)), attributes)


_ITERATED = (set, bytearray, collections.deque)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, collections.OrderedDict):
        return tuple(collections.OrderedDict.items(value))
    if isinstance(value, dict):
        return tuple(dict.items(value))
    if isinstance(value, list):
        return tuple(list.__iter__(value))
    own: Any = next((base for base in _ITERATED if isinstance(value, base)), None)
    return () if own is None else tuple(own.__iter__(value))


def parts(held: ObjectContents) -> Iterator[Any]:
    """The values in what an object holds."""
    yield from held.items
    yield from held.attributes.values()


def is_same(value: Any, before: ObjectContents, after: ObjectContents) -> bool:
    """Whether an object held the same at two moments; its parts are compared by identity."""
    if not _are_same(before.attributes, after.attributes):
        return False
    if isinstance(value, set):
        return set(before.items) == set(after.items)
    mine: Any = before.items
    theirs: Any = after.items
    if isinstance(value, dict):
        mine, theirs = (list(itertools.chain.from_iterable(pairs)) for pairs in (mine, theirs))
    return len(mine) == len(theirs) and all(map(_is_one, mine, theirs))


def _are_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.keys() == after.keys() and all(_is_one(v, after[k]) for k, v in before.items())


def _is_one(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts."""
    return a is b or (type(a) is type(b) and type(a) in _NUMBERS_AND_TEXTS and a == b)


def empty(value: Any) -> Any:
    """An object of the same kind that holds nothing."""
    kind = type(value)
    base: Any = next(base for base in _BASES if issubclass(kind, base))
    try:
        if base in (collections.deque, collections.defaultdict):
            # Their constructors take more than the items.
            made = copy.copy(value)
            made.clear()
            return made
        # The constructor of a user's class may want arguments.
        return base.__new__(kind)
    except TypeError:
        return copy.copy(value)


_BASES = (
    collections.deque,
    collections.defaultdict,
    collections.OrderedDict,
    dict,
    list,
    set,
    bytearray,
    types.SimpleNamespace,
    object,
)


def fill(value: Any, held: ObjectContents) -> None:
    """Makes an object hold this and nothing else."""
    if isinstance(value, dict):
        # Of an OrderedDict, `dict.clear` would leave the order behind.
        own: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        own.clear(value)
        for key, item in held.items:
            own.__setitem__(value, key, item)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), held.items)
    elif isinstance(value, bytearray):
        value[:] = bytes(held.items)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, held.items)
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(held.items)
    for name in held_by(value).attributes.keys() - held.attributes.keys():
        object.__delattr__(value, name)
    for name, attribute in held.attributes.items():
        object.__setattr__(value, name, attribute)
