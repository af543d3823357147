"""Defines the errors of the command line for input that it cannot use."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Sequence

from bridge._errors import BridgeError

from ._places import user_place

# Further than the mark is from the beginning of a page.
_BEGINNING = 1000


class InputError(BridgeError, ValueError):
    """An argument, or what it names, is not what a command needs.

    Attributes:
        where: the argument.
        found: what there is.
        expected: what is needed.
        remedy: what to do.
    """

    def __init__(self, where: str, found: str, expected: str, remedy: str):
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(where, found, expected, remedy)

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}, expected {self.expected}; {self.remedy}"


class SeveralInputsError(BridgeError):
    """What is wrong with several inputs, a message each."""

    def __init__(self, *errors: BridgeError):
        self.errors = errors
        super().__init__(*errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def check_filter(expression: re.Pattern[str], kept: Iterable[str], paths: Sequence[str]) -> None:
    """Raises an error if no leaf is left by `--filter`.

    Args:
        expression: that of `--filter`.
        kept: the paths that are left.
        paths: those of all leaves.

    Raises:
        InputError: none is left, though there are leaves.
    """
    if paths and not any(True for _ in kept):
        raise InputError(
            f"no leaf matches --filter {expression.pattern!r}",
            f"{len(paths)} leaves such as {paths[0]}",
            "an expression that is found in the path of one of them",
            "correct it, or leave it out to see all paths",
        )


def check_page(path: pathlib.Path, mark: str) -> None:
    """Raises an error if a page cannot be written to a path.

    Args:
        path: that of `--html`.
        mark: what is at the beginning of the pages that the command writes.

    Raises:
        InputError: there is a file that is not a page of the same command, a directory, or no
            directory to write to.
    """
    if path.is_dir() or not path.parent.is_dir():
        found = f"a directory at {path}" if path.is_dir() else f"no directory {path.parent}"
        raise InputError("--html", found, "a file in a directory that exists", "correct the path")
    # A pipe or a device has no content to lose.
    if not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    if mark.encode() not in beginning:
        raise InputError(
            "--html",
            f"a file at {path} that this command did not write",
            "a page that it wrote before, or nothing",
            "name another file, or remove it",
        )


class ProgramError(BridgeError, RuntimeError):
    """A program that the command line was told to run raises.

    Attributes:
        what: what was running.
        kind: the error's type.
        text: the first line of its message.
        place: the file and line of the program that the error comes from, None if it is none of
            the program's.
    """

    def __init__(self, what: str, kind: str, text: str, place: str | None):
        self.what = what
        self.kind = kind
        self.text = text
        self.place = place
        super().__init__(what, kind, text, place)

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place}; "
        return f"{self.what} raised {self.kind}: {self.text}\n({where}--traceback shows all of it)"

    @classmethod
    def of(cls, what: str, error: Exception) -> ProgramError:
        """The error for one that a program raised."""
        return cls(what, type(error).__name__, first_line(error), user_place(error))


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
