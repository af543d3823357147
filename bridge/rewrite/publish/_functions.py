"""Holds the results for the functions that train the model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

from bridge.rewrite.plan._refusals import Refusal


@dataclasses.dataclass(frozen=True)
class FunctionResult:
    """The result for a function, or for a class of states.

    Attributes:
        name: its name.
        file: where it is.
        line: its first line.
        end: its last line.
        refusal: why it stays as it is, None if it is rewritten.
    """

    name: str
    file: str
    line: int
    end: int
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """The rewritten training program.

    Attributes:
        functions: each function that has to change.
        sources: the texts of the new files by path, empty if the program is not proven.
        old_sources: the path of the old file that each new file comes from.
        difference: the largest difference in three steps, None if the program is not proven.
    """

    functions: tuple[FunctionResult, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    old_sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    difference: float | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the new functions ran and did the same as the old ones."""
        return self.difference is not None

    @property
    def left(self) -> tuple[FunctionResult, ...]:
        """The functions that have to change but stay as they are."""
        return tuple(each for each in self.functions if each.refusal is not None)

    def is_about(self, place: str) -> bool:
        """Whether the line of a place, `file.py:12: ...`, was rewritten with the training.

        The file may be a whole path or the end of one.
        """
        file, line, _ = place.split(":", 2)
        return any(
            each.refusal is None
            and f"/{pathlib.PurePath(each.file).as_posix()}".endswith(f"/{file}")
            and each.line <= int(line) <= each.end
            for each in self.functions
        )

    def shown(self) -> Iterator[str]:
        """The lines of the report: the proof, and each function that stays as it is."""
        yield self.verdict
        for each in self.left:
            name = pathlib.PurePath(each.file).name
            yield f"  {name}:{each.line}: {each.name} stays as it is: {each.refusal}"
        for each in dict.fromkeys(r.refusal for r in self.left if r.refusal is not None):
            yield f"  to rewrite more: [{each.id}] {each.remedy}"

    @property
    def verdict(self) -> str:
        """The outcome of the proof in a few words."""
        if self.difference is None:
            return "the training stays as it is"
        count = sum(each.refusal is None for each in self.functions)
        return (
            f"{count} functions of the training are rewritten; three steps are proven,"
            f" largest difference {self.difference:.3g}"
        )
