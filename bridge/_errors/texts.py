"""How values and lists of problems are written in messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import BridgeError as BridgeError


def path_text(collection: str, path: Iterable[Any]) -> str:
    """A collection and a path as one text, as Flax's messages write them."""
    return "/".join([collection, *map(str, path)])


def shown(found: object) -> str:
    """What was found, short enough for a message."""
    if isinstance(found, type):
        return f"the class {found.__name__}"
    text = repr(found)
    return f"{text if len(text) < 80 else text[:77] + '…'} of type {type(found).__name__}"


def misfits(
    missing: Iterable[tuple[str, str]], others: Iterable[tuple[str, str, str]]
) -> list[str]:
    """The lines for what is not there and for what is there and is another."""
    return [
        *(f"{path}: missing, expected {expected}" for path, expected in missing),
        *(f"{path}: expected {expected}, found {found}" for path, expected, found in others),
    ]


def bullets(lines: Iterable[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
