"""Defines the changes of a file: decided first, and written as text afterwards."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from bridge.rewrite.syntax._source import Edit, Source


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call in parentheses, on lines of their own where they do not fit.

    `each` has the parts of each argument. `indent` is how much deeper the call is than the
    statement that is replaced.
    """

    each: tuple[tuple[Part, ...], ...]
    indent: int = 0


Part: TypeAlias = "str | ast.AST | Arguments"
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Change:
    """A node with another text.

    `parts` are texts, and nodes of the file with the changes inside them.
    """

    node: ast.AST
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Before:
    """A new line above a statement.

    `parts` are as for `Change`.
    """

    statement: ast.stmt
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Removed:
    """A statement that the new program does not need."""

    statement: ast.stmt


@dataclasses.dataclass(frozen=True)
class Dropped:
    """An argument that goes, with its comma.

    `end` is the last node of it, such as its default.
    """

    node: ast.AST
    end: ast.AST


Decision: TypeAlias = "Change | Before | Removed | Dropped"


def separated(parts: Iterable[Sequence[Part]]) -> tuple[Part, ...]:
    """Arguments with commas between them."""
    found: list[Part] = []
    for each in parts:
        found += [*([", "] if found else []), *each]
    return tuple(found)


def edits_of(source: Source, changes: Iterable[Decision]) -> list[Edit]:
    """The changes as edits of the file."""
    changes = [*changes]
    edits = _without_arguments(source, [c for c in changes if isinstance(c, Dropped)])

    def text(parts: Iterable[Part], node: ast.AST) -> str:
        found = ""
        for part in parts:
            if isinstance(part, Arguments):
                found += arguments(part, node, found)
            else:
                found += part if isinstance(part, str) else source.render(part, edits)
        return found

    def arguments(given: Arguments, node: ast.AST, before: str) -> str:
        texts = [text(parts, node) for parts in given.each]
        line, margin = f"({', '.join(texts)})", source.statement_of(node).col_offset
        margin += given.indent
        column = margin if isinstance(node, ast.stmt) else node.col_offset  # pyright: ignore
        if column + len(before) + len(line) <= _WIDTH and "\n" not in line:
            return line
        inner = "\n" + " " * (margin + 4)
        return f"({''.join(f'{inner}{each},' for each in texts)}\n{' ' * margin})"

    def size(change: Change) -> int:
        return source.end(change.node) - source.start(change.node)

    # What is inside another change is written first.
    for change in sorted((c for c in changes if isinstance(c, Change)), key=size):
        edits.append(source.edit(change.node, text(change.parts, change.node)))
    removed = {c.statement for c in changes if isinstance(c, Removed)}
    above: dict[ast.stmt, list[str]] = {}
    for each in changes:
        if isinstance(each, Before):
            above.setdefault(each.statement, []).append(text(each.parts, each.statement))
    for statement in [*above, *(removed - set(above))]:
        lines = above.get(statement, [])
        margin = "\n" + " " * statement.col_offset
        start = source.start(statement)
        if statement not in removed:
            edits.append(Edit(start, start, "".join(f"{line}{margin}" for line in lines)))
        elif lines or _is_alone(source, statement, removed):
            edits.append(source.edit(statement, margin.join(lines or ["pass"])))
        else:
            edits.append(source.lines_of(statement))
    return edits


def _without_arguments(source: Source, dropped: Iterable[Dropped]) -> list[Edit]:
    """Takes arguments away, and the comma behind each or, behind the last ones, before them."""
    edits: list[Edit] = []
    for each in sorted(dropped, key=lambda d: source.start(d.node)):
        start, end = source.start(each.node), source.end(each.end)
        if edits and edits[-1].end == start:
            start = edits.pop().start
        behind = re.match(rb"\s*,\s*", source.data[end:])
        if behind is not None and source.data[end + behind.end() :][:1] != b")":
            end += behind.end()
        elif before := re.search(rb",\s*$", source.data[:start]):
            start = before.start()
        elif behind is not None:
            end += behind.end()
        edits.append(Edit(start, end, ""))
    return edits


def _is_alone(source: Source, statement: ast.stmt, removed: set[Any]) -> bool:
    """Whether a statement is the first of a block that nothing is left of."""
    parent = source.parents[statement]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block[0] is statement and all(each in removed for each in block)
    return False
