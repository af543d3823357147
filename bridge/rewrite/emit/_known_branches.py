"""Branches whose condition the new model knows: one stays, without its `if`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bridge.rewrite.plan._method import Method
from bridge.rewrite.syntax._source import Edit

from ._dead import blocks_of

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)


def branch_edits(method: Method, node: ast.If, *, value: bool) -> Iterator[Edit] | None:
    """The edits that leave one branch of a statement.

    Args:
        method: the method.
        node: the statement.
        value: its condition.

    Returns:
        None if the statement has to stay as it is.
    """
    source = method.source
    block = next(b for b in blocks_of(source.parents[node]) if node in b)
    kept, gone = (node.body, node.orelse) if value else (node.orelse, node.body)
    makers = {source.statement_of(slot.node) for slot in method.slots}
    if not _is_simple([*kept, *gone]) or makers & {*kept, *gone}:
        return None
    if any(line.lstrip().startswith("#") for line in source.render(node).split("\n")):
        return None
    if not kept:
        return None if block == [node] else iter([source.lines_of(node)])
    return _unindented(method, node, kept)


def _unindented(method: Method, node: ast.If, kept: list[ast.stmt]) -> Iterator[Edit]:
    source, width = method.source, kept[0].col_offset - node.col_offset
    yield Edit(source.start(node), source.start(kept[0]), "")
    last = kept[-1].end_lineno or kept[-1].lineno
    for line in range(kept[0].lineno + 1, last + 1):
        begin = source.offset(line, 0)
        if source.data[begin : begin + width].isspace():
            yield Edit(begin, begin + width, "")
    if source.end(kept[-1]) < source.end(node):
        yield Edit(source.end(kept[-1]), source.end(node), "")


def _is_simple(statements: list[ast.stmt]) -> bool:
    """Whether nothing in statements depends on how far they are indented."""
    return all(
        isinstance(each, _SIMPLE)
        and not any(
            isinstance(n, ast.Constant | ast.JoinedStr) and n.lineno != n.end_lineno
            for n in ast.walk(each)
        )
        for each in statements
    )
