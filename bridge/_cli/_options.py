"""The options of the command line that stand for the Python arguments which messages name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from bridge._errors import BridgeError, MissingRngError, UnboundAxisError

_KEYWORD = re.compile(r"'(\w+)': ([^,}]+)")
_QUOTED = re.compile(r"'([^']*)'")


def _keywords(found: re.Match[str]) -> str:
    """Keyword arguments, each of which is an option of its own."""
    return " ".join(f"--kwarg {name}={value}" for name, value in _KEYWORD.findall(found[1]))


def _files(found: re.Match[str]) -> str:
    """A list of files, each of which is an option of its own."""
    return " ".join(f"--by-hand {file}" for file in _QUOTED.findall(found[1]))


def _valued(found: re.Match[str]) -> str:
    return f"--{found[1]} {found[2]}" if found[2] else f"--{found[1]}"


# The option, and what names it in Python.
_ARGUMENTS = (
    ("--kwarg", re.compile(r"\bkwargs=(\{[^{}]*\})"), _keywords),
    (
        "--kwarg",
        re.compile(r"\blinen=lambda variables, x: module\.apply\(variables, x, train=False\)"),
        "--kwarg train=False",
    ),
    ("--rngs", re.compile(r"\brngs=\{'(\w+)': key\}"), r"--rngs \1=0"),
    # A model's own argument is `--kwarg train=True` by now.
    ("--train", re.compile(r"(?<!--kwarg )\btrain=True\b"), "--train"),
    (
        "--axis-size",
        re.compile(r"\boptions=parity\.Options\(axis_sizes=\{'(\w+)': (\d+)\}\)"),
        r"--axis-size \1=\2",
    ),
    ("--steps", re.compile(r"\b(steps)=(\d+)"), _valued),
    ("--overwrite", re.compile(r"\boverwrite=True"), "--overwrite"),
    ("--by-hand", re.compile(r"\bby_hand=\[([^\]]*)\]"), _files),
    ("--model", re.compile(r"\balso="), "--model"),
    ("--only", re.compile(r"\bonly="), "--only"),
    ("--skip", re.compile(r"\bskip="), "--skip"),
    ("--verify", re.compile(r"\bverify=True"), "--verify"),
    ("--layout", re.compile(r"\b(layout)=(?:'(\w+)')?"), _valued),
    ("--within", re.compile(r"\b(within)=()"), _valued),
)
# What those commands are told that have no such option.
_ELSEWHERE: dict[type[BridgeError], str] = {
    MissingRngError: "--kwarg NAME=VALUE; parity has --train and --rngs dropout=0 too",
    UnboundAxisError: "--axis-size NAME=N of parity",
}


def in_options(text: str, options: Collection[str]) -> str:
    """A message of the package with options in the place of arguments.

    Args:
        text: the message.
        options: those that the command has.
    """
    for option, expression, written in _ARGUMENTS:
        if option in options:
            text = expression.sub(written, text)
    return text


def error_in_options(error: BridgeError, options: Collection[str]) -> str:
    """The same of an error; it says which command has the option if this one has none."""
    own = str(error)
    text = in_options(own, options)
    for kind, elsewhere in _ELSEWHERE.items():
        if isinstance(error, kind) and text == own:
            return f"{text} (on the command line: {elsewhere})"
    return text


def report_in_options(report: Any, options: Collection[str]) -> Any:
    """The same of the hints and the notes in a report of `bridge.parity`."""
    sections = [
        dataclasses.replace(section, note=in_options(section.note, options))
        for section in report.sections
    ]
    hints = [in_options(hint, options) for hint in report.hints]
    return dataclasses.replace(report, sections=tuple(sections), hints=tuple(hints))
