"""What the Python objects in static attributes hold, so that writes are found and undone."""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import functools
import itertools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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
# A larger object is configuration or data: looking at all of it would take longer than most calls.
_MOST_OBJECTS = 20_000
_MISSING = object()


def can_change(value: Any) -> bool:
    """Whether a static value is an object that can be written into, or holds one."""
    kind = type(value)
    return any(map(can_change, value)) if _is_fixed(kind) else _is_writable(kind)


class WrittenObjects:
    """The objects in some values, and what each of them holds now.

    A call that writes into them changes a model that others use too: Flax keeps static attributes
    as they are.

    Args:
      values: the values.
      besides: the ids of objects that somebody else looks after.
    """

    def __init__(self, values: Iterable[Any], besides: Container[int] = ()):
        # What is in here is kept alive, so that its id stays its own.
        self._before: dict[int, tuple[Any, _Held]] = {}
        pending = list(values)
        while pending and len(pending) < _MOST_OBJECTS:
            value = pending.pop()
            kind = type(value)
            if _is_fixed(kind):
                pending += value
            elif _is_writable(kind) and id(value) not in self._before and id(value) not in besides:
                held = _held(value)
                self._before[id(value)] = value, held
                pending += _parts(held)

    def undo(self) -> Callable[[Any], Any]:
        """Puts back what the objects held.

        Returns:
          A function that makes of a value the same one as it was before this: objects that were
          written into are copies in it, and all else is itself. The values of one call of `undo`
          share their copies.
        """
        after = {key: _held(value) for key, (value, _) in self._before.items()}
        written = {k for k, (v, held) in self._before.items() if not _is_same(v, held, after[k])}
        if not written:
            return unwritten
        copies = _Copies(written)
        # All of them before anything is put back.
        for key in after:
            copies.of(self._before[key][0])
        for key in written:
            _fill(*self._before[key])
        return copies.of


def unwritten(value: Any) -> Any:
    """The copy of a value that nobody has written into: the value itself."""
    return value


class _Held(NamedTuple):
    """What an object holds.

    Attributes:
      items: as a container.
      attributes: by name.
    """

    items: tuple[Any, ...]
    attributes: Mapping[str, Any]


class _Copies:
    """Copies of the objects that were written into, and of those that hold one.

    Args:
      written: the ids of objects that were written into.
    """

    def __init__(self, written: set[int]):
        self._written = written
        self._made: dict[int, Any] = {}
        # The copied objects are kept alive with their copies.
        self._originals: list[Any] = []

    def of(self, value: Any) -> Any:
        """The value, or its copy."""
        if id(value) in self._made:
            return self._made[id(value)]
        if not self._reaches(value):
            return value
        kind = type(value)
        self._originals.append(value)
        if _is_fixed(kind):
            make = getattr(kind, "_make", kind)
            self._made[id(value)] = make(map(self.of, value))
            return self._made[id(value)]
        made = self._made[id(value)] = _empty(value)
        held = _held(value)
        items = tuple(map(self.of, held.items))
        _fill(made, _Held(items, {k: self.of(v) for k, v in held.attributes.items()}))
        return made

    def _reaches(self, value: Any) -> bool:
        """Whether a value is or holds an object that was written into."""
        seen: dict[int, Any] = {}
        pending = [value]
        while pending:
            value = pending.pop()
            if id(value) in self._written:
                return True
            kind = type(value)
            if id(value) in seen:
                continue
            if _is_fixed(kind):
                pending += value
            elif _is_writable(kind):
                pending += _parts(_held(value))
            else:
                continue
            seen[id(value)] = value
        return False


@functools.lru_cache(maxsize=4096)
def _is_fixed(kind: type) -> bool:
    """Whether objects of a type are tuples or alike, whose items may be written into."""
    return kind in (tuple, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_make"))


@functools.lru_cache(maxsize=4096)
def _is_writable(kind: type) -> bool:
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


def _held(value: Any) -> _Held:
    kind = type(value)
    attributes = dict(getattr(value, "__dict__", ()))
    for name in _slots(kind):
        held = getattr(value, name, _MISSING)
        if held is not _MISSING:
            attributes[name] = held
    for name in _derived(kind) & attributes.keys():
        del attributes[name]
    return _Held(tuple(_items(value)), attributes)


_ITERATED = (set, bytearray, collections.deque)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, collections.OrderedDict):
        return tuple(collections.OrderedDict.items(value))
    if isinstance(value, dict):
        return tuple(dict.items(value))
    if isinstance(value, list):
        return tuple(list.__iter__(value))
    return tuple(value) if isinstance(value, _ITERATED) else ()


def _parts(held: _Held) -> Iterator[Any]:
    yield from held.items
    yield from held.attributes.values()


def _is_same(value: Any, before: _Held, after: _Held) -> bool:
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


def _empty(value: Any) -> Any:
    """An object of the same kind that holds nothing."""
    kind = type(value)
    if isinstance(value, collections.deque | collections.defaultdict):
        # Their constructors take more than the items.
        made = copy.copy(value)
        made.clear()
        return made
    return kind.__new__(kind)


def _fill(value: Any, held: _Held) -> None:
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
    for name in _held(value).attributes.keys() - held.attributes.keys():
        object.__delattr__(value, name)
    for name, attribute in held.attributes.items():
        object.__setattr__(value, name, attribute)
