"""Lines of a constructor, with their depth, as text."""

from __future__ import annotations

import ast
from typing import Any

from ._source import indented

_WIDTH = 100
Lines = list[tuple[int, str]]
"""Lines with the depth of their indentation; see `Slice`."""


def as_text(lines: Lines, indent: int, unit: int = 4) -> str:
    """Lines as text, each with its indentation."""
    found = []
    for depth, text in lines:
        column = indent + unit * depth
        if text.startswith("\0"):
            _, old, statement = text.split("\0", 2)
            line = indented(statement, int(old), column)
        else:
            line = text
        found.append(wrapped(" " * column + line, column))
    return "\n".join(found)


def wrapped(line: str, column: int) -> str:
    """A line that is too long with one argument of its outermost call on each line."""
    if len(line) <= _WIDTH or "\n" in line:
        return line
    text = line.strip()
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:
        return line
    call: Any = getattr(statement, "value", None)
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and (call.func.attr == "append")
        and len(call.args) == 1
    ):
        call = call.args[0]
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Call):
        call = call.func
    if not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return line
    parts = [ast.get_source_segment(text, a) or "" for a in call.args]
    for keyword in call.keywords:
        value = ast.get_source_segment(text, keyword.value) or ""
        parts.append(f"{keyword.arg}={value}" if keyword.arg else f"**{value}")
    data = text.encode()
    head = data[: call.func.end_col_offset].decode()
    tail = data[call.end_col_offset :].decode()
    blank = " " * column
    joined = ", ".join(parts)
    if len(joined) + column + 4 <= _WIDTH:
        rows = [f"{blank}    {joined}"]
    else:
        rows = [f"{blank}    {part}," for part in parts]
    return "\n".join([f"{blank}{head}(", *rows, f"{blank}){tail}"])
