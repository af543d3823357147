"""Finds the sizes that an NNX constructor takes by what the parts of the module are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

# Stands for a size that is not known yet, and is a multiple of most numbers of heads and groups.
_UNKNOWN = 5040 * 16


class PartSize(NamedTuple):
    """A size that comes from the call of a part of a module.

    Attributes:
      part: the attribute that holds the part, or an `nnx.List` of parts.
      axis: the axis of the first argument of the part's call.
    """

    part: str
    axis: int


def found_sizes(
    make: Callable[[Mapping[str, Any]], Any],
    call: Callable[[Any], object],
    sizes: Mapping[str, PartSize],
) -> dict[str, Any]:
    """The sizes: a number, or a tuple of a number for each part of a list.

    The module is made and called abstractly with sizes that are not known yet. The first part that
    is called with another size than it was made with stops the call and reveals its size. The next
    run assumes that later parts in the list have this size too, so there are as many runs as the
    size changes.

    Raises LookupError with the name of the size if the call does not reach a part.
    """
    known = {name: _Sizes() for name in sizes}

    def run() -> None:
        module = make({name: each.value() for name, each in known.items()})
        for name, (part, axis) in sizes.items():
            held: Any = getattr(module, part)
            own = known[name]
            count = _length(held)
            own.begin(count)
            if count is None:
                setattr(module, part, _Probe(held, own, 0, axis))
            for number in range(count or 0):
                held[number] = _Probe(held[number], own, number, axis)
        call(module)

    while True:
        try:
            jax.eval_shape(run)  # pyright: ignore
        except _ChangedError:
            continue
        for name, each in known.items():
            if not each.sizes:
                raise LookupError(name)
        return {name: each.value() for name, each in known.items()}


def _length(part: object) -> int | None:
    """How many parts a list has, None for another part."""
    return len(part) if isinstance(part, nnx.List) else None  # pyright: ignore


class _ChangedError(Exception):
    """A part was called with another size than it was made with."""


class _Sizes:
    """The sizes of one part, or of those of a list, as far as they are known."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._count: int | None = None
        self._called: set[int] = set()

    def begin(self, count: int | None) -> None:
        """Starts a run with as many parts, None where it is no list."""
        self._count, self._called = count, set()

    def value(self) -> Any:
        """What the constructor is given."""
        if self._count is not None:
            return tuple(map(self.at, range(self._count)))
        return _Unknown() if not self.sizes else self.sizes[0]

    def at(self, number: int) -> int:
        """The size of a part: its own, or that of the last one before it that is known."""
        before = [each for each in self.sizes if each <= number]
        return self.sizes[max(before)] if before else _UNKNOWN

    def note(self, number: int, size: int) -> None:
        """Takes the size of the first call of a part.

        Raises _ChangedError if the part was made with another one.
        """
        if number in self._called:
            return
        self._called.add(number)
        was, self.sizes[number] = self.at(number), size
        if was != size:
            raise _ChangedError


class _Unknown(int):
    """A size that is not known yet; a constructor may take it as a tuple of sizes too."""

    def __new__(cls) -> _Unknown:
        return super().__new__(cls, _UNKNOWN)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield _UNKNOWN


class _Probe:
    """Stands for a part, and notes what it is called with."""

    def __init__(self, part: Callable[..., Any], sizes: _Sizes, number: int, axis: int) -> None:
        self._part, self._sizes, self._number, self._axis = part, sizes, number, axis

    def __call__(self, first: jax.Array, *args: object, **kwargs: object) -> Any:
        self._sizes.note(self._number, first.shape[self._axis])
        return self._part(first, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
