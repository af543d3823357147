"""Finds what the program wrote for a local name that stands for a shape."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import binding


def written_tuple(
    function: ast.AST, node: ast.AST, namespace: Mapping[str, Any], makings: Sequence[Making]
) -> ast.Tuple | None:
    """The tuple that a name stands for each time that it is read.

    Args:
        function: where the name is read.
        node: the name.
        namespace: the names of the file.
        makings: every time that it was read.

    Returns:
        None if it is no such name, or what the tuple is made of got another value since.
    """
    value = _tuple_of(function, node)
    if value is None or not makings or makings[0].is_cache:
        return None
    for making in makings:
        try:
            now = evaluate(value, {**namespace, **making.env}, making.fields)
        except UnknownValueError:
            return None
        if now != making.env.get(node.id):  # pyright: ignore
            return None
    return value


def _tuple_of(function: ast.AST, node: ast.AST) -> ast.Tuple | None:
    if not isinstance(node, ast.Name):
        return None
    bound = binding(function, node.id)
    if len(bound) != 1 or not isinstance(bound[0], ast.Assign):
        return None
    value = bound[0].value
    return value if isinstance(value, ast.Tuple) else None
