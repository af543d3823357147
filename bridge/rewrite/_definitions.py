"""Local names that stand for a shape, by what the program wrote for it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._caches import is_cache
from ._evaluate import UnknownValueError, evaluate
from ._plans import LeftLinenError
from ._records import Making
from ._source import binding

if TYPE_CHECKING:
    from ._method import Method


def written_out(method: Method, node: ast.AST, makings: Sequence[Making]) -> str | None:
    """`(1, self.length, in_features)` for the name of such a tuple.

    Args:
        method: where the name is read.
        node: the name.
        makings: every time that it was read.

    Returns:
        None if it is no such name, or a part of the tuple is known to the call alone.
    """
    value = _tuple_of(method, node)
    if value is None or not makings or is_cache(makings[0]):
        return None
    for making in makings:
        try:
            now = evaluate(value, {**method.namespace, **making.env}, making.fields)
        except UnknownValueError:
            return None
        if now != making.env.get(node.id):  # pyright: ignore
            # What it is made of got another value since.
            return None
    try:
        text = method.init_text(value, makings)
    except LeftLinenError:
        return None
    return text if text.startswith("(") else f"({text})"


def _tuple_of(method: Method, node: ast.AST) -> ast.Tuple | None:
    if not isinstance(node, ast.Name):
        return None
    bound = binding(method.node, node.id)
    if len(bound) != 1 or not isinstance(bound[0], ast.Assign):
        return None
    value = bound[0].value
    return value if isinstance(value, ast.Tuple) else None
