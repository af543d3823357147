"""Which Python objects a call has written into; their contents are put back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from .object_contents import (
    ObjectContents,
    empty,
    fill,
    held_by,
    is_fixed,
    is_same,
    is_writable,
    parts,
)

# A larger object is configuration or data: looking at all of it would take longer than most calls.
_MOST_OBJECTS = 20_000


def can_change(value: Any) -> bool:
    """Whether a static value is an object that can be written into, or holds one."""
    kind = type(value)
    return any(map(can_change, value)) if is_fixed(kind) else is_writable(kind)


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
        self._before: dict[int, tuple[Any, ObjectContents]] = {}
        pending = list(values)
        while pending and len(pending) < _MOST_OBJECTS:
            value = pending.pop()
            kind = type(value)
            if is_fixed(kind):
                pending += value
            elif is_writable(kind) and id(value) not in self._before and id(value) not in besides:
                held = held_by(value)
                self._before[id(value)] = value, held
                pending += parts(held)

    def undo(self) -> Callable[[Any], Any]:
        """Puts back what the objects held.

        Returns:
          A function that makes of a value the same one as it was before this: objects that were
          written into are copies in it, and all else is itself. The values of one call of `undo`
          share their copies.
        """
        after = {key: held_by(value) for key, (value, _) in self._before.items()}
        written = {k for k, (v, held) in self._before.items() if not is_same(v, held, after[k])}
        if not written:
            return unwritten
        copies = _Copies(written)
        # All of them before anything is put back.
        for key in after:
            copies.of(self._before[key][0])
        for key in written:
            fill(*self._before[key])
        return copies.of


def unwritten(value: Any) -> Any:
    """The copy of a value that nobody has written into: the value itself."""
    return value


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
        if is_fixed(kind):
            make = getattr(kind, "_make", kind)
            self._made[id(value)] = make(map(self.of, value))
            return self._made[id(value)]
        made = self._made[id(value)] = empty(value)
        held = held_by(value)
        items = tuple(map(self.of, held.items))
        fill(made, ObjectContents(items, {k: self.of(v) for k, v in held.attributes.items()}))
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
            if is_fixed(kind):
                pending += value
            elif is_writable(kind):
                pending += parts(held_by(value))
            else:
                continue
            seen[id(value)] = value
        return False
