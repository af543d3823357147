"""Finds what of `self.size or x.shape[-1]` needs the call, so that it can stay a choice."""

from __future__ import annotations

import ast
from typing import NamedTuple

from bridge.rewrite.syntax._taint import Taint


class Choice(NamedTuple):
    """An expression that chooses between others.

    Attributes:
        factors: what of it needs the call, without the arithmetic around it.
        known: the parts that a constructor knows, the condition among them.
    """

    factors: list[ast.expr]
    known: list[ast.expr]


def choice_of(node: ast.expr, taint: Taint) -> Choice | None:
    """The parts of such an expression; None if it is another one, or the condition needs the call.

    Args:
        node: the expression, which depends on the call.
        taint: what depends on the call.
    """
    match node:
        case ast.BoolOp(op=ast.Or()):
            parts, test = node.values, None
        case ast.IfExp():
            parts, test = [node.body, node.orelse], node.test
        case _:
            return None
    touched = [each for each in parts if taint.touches(each)]
    needs_the_call = len(touched) == len(parts) if test is None else taint.touches(test)
    if needs_the_call or not touched:
        return None
    # `4 * width` is a product also if it was never chosen.
    factors = [each for part in touched for each in _factors(part, taint)]
    known = [each for each in (*parts, test) if each is not None and each not in touched]
    return Choice(factors, known)


def _factors(node: ast.expr, taint: Taint) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        both = (node.left, node.right)
        return [f for each in both if taint.touches(each) for f in _factors(each, taint)]
    return [node]
