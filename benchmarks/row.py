"""Defines a row of the table: its measurement, its sizes, and its target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

Size: TypeAlias = int | str
# For a timed row what makes the function to be timed, for a counted one what gives the figure.
Subject: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A figure to be had: one subject over another.

    Attributes:
      of: the subject above the line.
      to: the subject below it.
      at_most: the target, None where there is none.
      since: the smallest size that the target is for.
      is_for_stacks: whether it is not for a named model, which computes for longer than it takes to
        be dispatched.
    """

    of: str
    to: str
    at_most: float | None = None
    since: int = 1
    is_for_stacks: bool = False

    def target(self, size: Size) -> float | None:
        """The target at a size, None if there is none."""
        is_meant = size >= self.since if isinstance(size, int) else not self.is_for_stacks
        return self.at_most if is_meant else None


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      name: what is measured.
      unit: seconds are timed, equations, instructions and bytes are counted.
      sizes: blocks, leaves, or the name of a model; a quick run takes the first two.
      subjects: by name; each is given the case of a size.
      ratios: what the table shows.
      case: makes what the subjects are given, None for the model of that size.
      largest: the largest size of a subject that is left out at larger ones.
      is_dispatch: whether calls are timed until they return rather than until they are done.
      rounds: of a row whose calls take long: how often at most every subject has its turn, in the
        first process alone.
      accelerator: the sizes for an accelerator; none of such a row's other sizes is measured there.
    """

    name: str
    unit: Literal["s", "equations", "instructions", "bytes"]
    sizes: tuple[Size, ...]
    subjects: Mapping[str, Subject]
    ratios: tuple[Ratio, ...]
    case: Callable[[Any], Any] | None = None
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_dispatch: bool = False
    rounds: int | None = None
    accelerator: tuple[Size, ...] = ()

    def subjects_at(self, size: Size) -> dict[str, Subject]:
        """The subjects that are measured at a size."""
        if not isinstance(size, int):
            return dict(self.subjects)
        return {n: s for n, s in self.subjects.items() if size <= self.largest.get(n, size)}
