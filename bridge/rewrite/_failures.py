"""Defines the errors of the rewriter."""

from __future__ import annotations

from collections.abc import Iterable

from bridge._errors import BridgeError


class RewriteError(BridgeError, ValueError):
    """A program cannot be rewritten, or a result cannot be written.

    Attributes:
        problems: every reason, one line each.
        remedy: what to do.
    """

    def __init__(self, what: str, problems: Iterable[str], remedy: str) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        self.remedy = remedy
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{what}:{lines}\n{remedy}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.what, self.problems, self.remedy)


def said(error: BaseException) -> str:
    """The type and the first line of another's error."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
