"""Defines the error of the command line for input that it cannot use."""

from __future__ import annotations

from bridge._errors import BridgeError


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
