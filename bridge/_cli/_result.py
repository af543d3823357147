"""Holds what a command found, before it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        schema: the name of the JSON document.
        document: the JSON document.
        shown: the same for people: lines, and tables of `_output.new_table`.
        ok: whether every check held, and what was compared is the same.
    """

    schema: str
    document: Mapping[str, Any]
    shown: Iterable[Any]
    ok: bool = True
