"""`self.size or x.shape[-1]` stays a choice, if only what is chosen from needs the call."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._records import Making
from ._source import Edit

if TYPE_CHECKING:
    from ._method import Method


def choice_edits(method: Method, node: ast.expr, makings: Sequence[Making]) -> list[Edit] | None:
    """What changes in such an expression, None if it is another one.

    Args:
        method: the method that it is in.
        node: the expression, which depends on the call.
        makings: every time that it was computed.
    """
    match node:
        case ast.BoolOp(op=ast.Or()):
            parts, test = node.values, None
        case ast.IfExp():
            parts, test = [node.body, node.orelse], node.test
        case _:
            return None
    touched = [each for each in parts if method.taint.touches(each)]
    needs_the_call = len(touched) == len(parts) if test is None else method.taint.touches(test)
    if needs_the_call:
        return None
    # `4 * width` is a product also if it was never chosen.
    factors = [each for part in touched for each in _factors(method, part)]
    texts = [method.as_size(each, makings) for each in factors]
    if not touched or None in texts:
        return None
    known = [each for each in (*parts, test) if each is not None and each not in touched]
    edits = [method.source.edit(e, str(t)) for e, t in zip(factors, texts, strict=True)]
    edits += [edit for each in known for edit in method.init_edits(each, makings)]
    text = method.source.render(node, edits)
    if not method.names_of(text):
        # The layer behind has this size, too.
        method.sizes.candidates.choices[node] = text
    return edits


def _factors(method: Method, node: ast.expr) -> list[ast.expr]:
    """What of an expression needs the call, without the arithmetic around it."""
    if isinstance(node, ast.BinOp):
        both = (node.left, node.right)
        return [f for each in both if method.taint.touches(each) for f in _factors(method, each)]
    return [node]
