"""Writes values and lists of problems for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from registry import BridgeError as BridgeError

# More lines than these hide a sentence below them.
_FEW = 12
# So many leaves are named where one reason holds for several.
_NAMED = 4


def path_text(collection: str, path: Iterable[Any]) -> str:
    """A collection and a path as one text, as Flax's messages write them."""
    return "/".join([collection, *map(str, path)])


def shown(found: object) -> str:
    """What was found, in one line that is short enough for a message."""
    if isinstance(found, type):
        return f"the class {found.__name__}"
    text = " ".join(repr(found).split())
    return f"{text if len(text) < 80 else text[:77] + '…'} of type {type(found).__name__}"


def misfits(
    missing: Iterable[tuple[str, str]], others: Iterable[tuple[str, str, str]]
) -> list[str]:
    """The lines for what is not there and for what is there and is another."""
    return [
        *(f"{path}: missing, expected {expected}" for path, expected in missing),
        *(f"{path}: expected {expected}, found {found}" for path, expected, found in others),
    ]


def by_reason(problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names and what is wrong with them; a reason that several share stands once."""
    names: dict[str, list[str]] = {}
    for name, reason in problems:
        names.setdefault(reason, []).append(name)
    return [(_counted(own), reason) for reason, own in names.items()]


def _counted(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    return f"{len(names)} leaves ({', '.join(names[:_NAMED])}{more})"


def bullets(lines: Iterable[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


def with_remedy(subject: str, lines: Sequence[str], remedy: str) -> str:
    """A message about several problems. What to do stands above a long list, else below it."""
    if remedy and len(lines) > _FEW:
        return f"{subject}, {len(lines)} problems. {remedy}{bullets(lines)}"
    return f"{subject}:{bullets(lines)}" + (f"\n{remedy}" if remedy else "")


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names what is spelled nearly the same; empty if nothing is."""
    # Capitals are a common slip, and the last of several equal ones would win.
    lower = {each.lower(): each for each in reversed(list(known))}
    found = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.7)
    return f"Did you mean {lower[found[0]]}?" if found else ""
