"""Lines of a constructor, with their depth, as text."""

from __future__ import annotations

import ast
from typing import Any

from bridge.rewrite.plan._plans import Lines
from bridge.rewrite.syntax._source import indented

_WIDTH = 100


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
    text = line.strip()
    if len(line) <= _WIDTH or "\n" in line or text.startswith("#"):
        return line
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:
        return line
    call: Any = getattr(statement, "value", None)
    if isinstance(call, ast.IfExp) and isinstance(statement, ast.Assign):
        return _choice(text, ast.unparse(statement.targets[0]), call, column)
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
    # What is called may have parentheses of its own.
    head = data[: data.index(b"(", call.func.end_col_offset)].decode()
    tail = data[call.end_col_offset :].decode()
    blank = " " * column
    joined = ", ".join(parts)
    if len(joined) + column + 4 <= _WIDTH:
        rows = [f"{blank}    {joined}"]
    else:
        rows = [f"{part_text(part, column + 4)}," for part in parts]
    return "\n".join([f"{blank}{head}(", *rows, f"{blank}){tail}"])


def _choice(text: str, target: str, choice: ast.IfExp, column: int) -> str:
    """A conditional expression that is assigned, with each of its parts on lines of its own."""
    rows = []
    for word, node in (("", choice.body), ("if ", choice.test), ("else ", choice.orelse)):
        part = ast.get_source_segment(text, node) or ""
        # A call has to be short enough with the word before it.
        whole = wrapped(" " * (column + 4 + len(word)) + part, column + 4)
        rows.append(" " * (column + 4) + word + whole.lstrip())
    return "\n".join([f"{' ' * column}{target} = (", *rows, f"{' ' * column})"])


def chosen(body: str, test: str, orelse: str, column: int, around: int) -> str:
    """A conditional expression in parentheses; on several lines where one would be too long.

    `column` is that of the statement, and `around` is how much else is on the line.
    """
    text = f"({body} if {test} else {orelse})"
    if around + len(text) <= _WIDTH:
        return text
    inner = "\n" + " " * (column + 4)
    return f"({inner}{body}{inner}if {test}{inner}else {orelse}\n{' ' * column})"


def part_text(part: str, column: int) -> str:
    """An argument on a line of its own; the call that a lambda is goes on several, if too long."""
    if "\n" in part:
        return " " * column + part
    head, colon, body = part.partition(": ")
    if not head.startswith("lambda ") or not colon or column + len(part) < _WIDTH:
        return " " * column + part
    first, *rest = wrapped(" " * (_WIDTH - column) + body, 0).split("\n")
    if not rest:
        return " " * column + part
    blank = " " * column
    return "\n".join([f"{blank}{head}: {first.strip()}", *(f"{blank}{line}" for line in rest)])
