"""One look at everything that a value holds; how each kind of value is told, others say."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

# Beyond this, rebuilding is cheaper than comparing, and exact.
MOST_VALUES = 20_000
MOST_PARTS = 200_000
MOST_BYTES = 1 << 26


class Mark:
    """Marks entries that are not values."""


ATOMS = frozenset({Mark, int, bool, str, bytes, type(None), type(Ellipsis), types.CodeType, range})
AGAIN, EMPTY, UNREAD, UNKNOWN, OBJECT = (Mark() for _ in range(5))

_tokens: dict[int, tuple[weakref.ref[Any], int]] = {}
_numbers = itertools.count()


def identity(value: Any) -> int | None:
    """A number that belongs to one object for good, None if the object cannot be given one."""
    found = _tokens.get(id(value))
    if found is not None and found[0]() is value:
        return found[1]
    key = id(value)
    try:
        ref = weakref.ref(value, lambda ref: _forget(_tokens, key, ref))
    except TypeError:
        return None
    number = next(_numbers)
    _tokens[key] = ref, number
    return number


def _number(value: Any) -> int:
    number = identity(value)
    return id(value) if number is None else number


def _forget(noted: dict[int, tuple[Any, Any]], key: int, ref: Any) -> None:
    found = noted.get(key)
    if found is not None and found[0] is ref:
        del noted[key]


class Walk:
    """One look at a value, without recursion: a value may hold itself.

    What is met is written down as headers from which the shape of the rest follows, so that two
    different values never have one key.

    Args:
      calls: as for `contents`.
      ordered: as for `contents`.
      made: as for `contents`.
      depth: in how many sets.
      most_values: how many values may be met, besides atoms.
      most_parts: how many parts the key may have.

    Attributes:
      known: keys of arrays that nobody can write into, by id.
      key: the headers and atoms so far.
      pending: values that are still to be looked at.
      objects: as in `Contents`.
      identities: as in `Contents`.
      opaque: as in `Contents`.
      is_complete: as in `Contents`.
    """

    def __init__(
        self,
        *,
        calls: bool,
        ordered: bool,
        made: bool = False,
        depth: int = 0,
        most_values: int = MOST_VALUES,
        most_parts: int = MOST_PARTS,
    ):
        self.calls = calls
        self.ordered = ordered
        self.made = made
        self.known: dict[int, Any] = {}
        self.depth = depth
        self.key: list[Any] = []
        self.pending: list[Any] = []
        self.objects: list[Any] = []
        self.identities: list[int] = []
        self.opaque: list[int] = []
        self.is_complete = True
        self.bytes_left = MOST_BYTES
        self._most_values = most_values
        self._most_parts = most_parts

    def run(self, value: Any) -> None:
        """Looks at a value and at everything in it."""
        key, pending, objects = self.key, self.pending, self.objects
        seen: dict[int, int] = {}
        pending.append(value)
        while pending:
            value = pending.pop()
            kind = type(value)
            if kind in ATOMS:
                key += (kind, value)
                continue
            if len(objects) > self._most_values or len(key) + len(pending) > self._most_parts:
                self.itself(value)
                return
            if kind is tuple:
                key += (tuple, len(value))
                pending += value
                continue
            index = seen.get(id(value))
            if index is not None:
                key += (AGAIN, index)
                continue
            # Keep visited objects alive, so that no id is reused.
            seen[id(value)] = len(objects)
            objects.append(value)
            tell = TELL.get(kind)
            if tell is None:
                noted = _tellers.get(id(kind))
                tell = noted[1] if noted is not None and noted[0]() is kind else _teller(kind)
            tell(self, value)

    def header(self, *parts: Any, holds: Iterable[Any] = ()) -> None:
        """Writes down what a value is, and puts what it holds on the list."""
        self.key += parts
        self.pending += holds

    def number(self, value: Any) -> int | None:
        """What the key has of an object that it tells by identity; None if that is told beside."""
        if not self.made:
            return _number(value)
        self.opaque.append(_number(value))
        return None

    def unknown(self, value: Any) -> None:
        """Notes a value that cannot be compared: the key is valid only now."""
        self.is_complete = False
        self.header(UNKNOWN, self.number(value), holds=[type(value)] if self.made else ())

    def itself(self, value: Any) -> None:
        """Notes a value that only itself is equal to; the key is valid only now."""
        self.is_complete = False
        self.header(UNKNOWN, _number(value))

    def mutable(self, value: Any) -> None:
        """Notes which object it is that may be written into."""
        number = identity(value)
        if number is not None:
            self.identities.append(number)

    def inner(self, value: Any) -> Walk:
        """Another look, at an item that has no place in an order.

        It does not know what this one has met, so an item may be met once for each way to it. All
        looks together therefore have one allowance.
        """
        values = self._most_values - len(self.objects)
        parts = self._most_parts - len(self.key) - len(self.pending)
        inner = Walk(
            calls=self.calls,
            ordered=self.ordered,
            made=self.made,
            depth=self.depth + 1,
            most_values=values,
            most_parts=parts,
        )
        inner.bytes_left = self.bytes_left
        inner.run(value)
        self._most_values -= values - inner._most_values + len(inner.objects)
        self._most_parts -= parts - inner._most_parts + len(inner.key)
        self.bytes_left = inner.bytes_left
        self.opaque += inner.opaque
        return inner


Teller: TypeAlias = Callable[[Walk, Any], None]
Tellers: TypeAlias = dict[type, Teller]
ParentTellers: TypeAlias = list[tuple[Any, Teller]]

# `_contents` fills them.
TELL: Tellers = {}
TELL_INSTANCES: ParentTellers = []

# By id: a WeakKeyDictionary lookup makes several Python calls.
_tellers: dict[int, tuple[weakref.ref[type], Teller]] = {}


def _teller(kind: type) -> Teller:
    """How to tell values of a type."""
    found = next(how for parent, how in TELL_INSTANCES if issubclass(kind, parent))
    key = id(kind)
    _tellers[key] = weakref.ref(kind, lambda ref: _forget(_tellers, key, ref)), found
    return found
