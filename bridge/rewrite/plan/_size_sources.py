"""Finds what the program wrote for a size that needs the call: a choice, or a tuple with a name."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import binding, names_in, only_value
from bridge.rewrite.syntax._taint import Taint


class Choice(NamedTuple):
    """An expression that chooses between others.

    `factors` has what of it needs the call, without the arithmetic around it. `known` has the parts
    that a constructor knows, the condition among them.
    """

    factors: list[ast.expr]
    known: list[ast.expr]


def choice_of(node: ast.expr, taint: Taint) -> Choice | None:
    """The parts of such an expression; None if it is another one, or the condition needs the call.

    The expression depends on the call.
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


def written_tuple(
    function: ast.FunctionDef,
    node: ast.AST,
    namespace: Mapping[str, Any],
    makings: Sequence[Making],
    taint: Taint,
) -> ast.Tuple | None:
    """The tuple that a name stands for each time that it is read.

    The name `node` is read in `function`. `makings` has every time that it was read. Returns None
    if it is no such name, or if what the tuple is made of got another value since.
    """
    value = only_value(function, node.id) if isinstance(node, ast.Name) else None
    if not isinstance(value, ast.Tuple) or not makings or makings[0].is_cache:
        return None
    for making in makings:
        try:
            now = evaluate(value, {**namespace, **making.env}, making.fields)
        except UnknownValueError:
            # The parts that need the call are told by their values.
            read = [names_in(part) for part in value.elts if not taint.touches(part)]
            known = set().union(*read) & taint.pure
            return value if all(len(binding(function, name)) == 1 for name in known) else None
        if now != making.env.get(node.id):  # pyright: ignore
            return None
    return value
