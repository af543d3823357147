"""Holds what a command found, before it is written."""

from __future__ import annotations

import dataclasses
import json
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

    @classmethod
    def of_suggestions(cls, command: str, suggestions: Any, lacking: str = "") -> Result:
        """The rules of a `port.Suggestions`, as Python and as TOML.

        `command` is the command that proposes them. `lacking` names what would tell the order of
        calls in both models, which these rules do not take into account; it is empty if they do.
        """
        lines = [str(suggestions)]
        if lacking:
            lines.append(f"# the order of calls was not compared; {lacking} would tell it")
        if suggestions.rules:
            lines += ["", "# for --rules:", suggestions.to_toml().rstrip()]
        document = json.loads(suggestions.to_json())
        return cls(f"{command}-suggestions", document, lines, suggestions.plan.ok)
