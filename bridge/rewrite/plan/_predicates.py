"""A condition on shapes as one on what the constructor knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import operand

from ._method import Method


def predicate(method: Method, test: ast.expr, records: Sequence[Making]) -> str | None:
    """An expression that is as true as the condition was in every record.

    `records` are the moments at which it was decided. Returns None if no expression was found or
    the condition always went one way.
    """
    spaces = [({**method.namespace, **r.env}, r.fields) for r in records]
    followed = _followed(method, test, spaces)
    if followed is not None:
        return followed
    try:
        outcomes = [bool(evaluate(test, *space)) for space in spaces]
    except UnknownValueError:
        return None
    if len(set(outcomes)) < 2:
        return None
    last = _last_dimensions(test, spaces)
    differ = [a != b for a, b in zip(*last, strict=True)] if last else [False] * len(outcomes)
    if last is not None and differ == outcomes:
        return _comparison(method, test, records, last)
    # Only strides and the like make shapes differ that no expression gives: any other condition is
    # written as it is, with its sizes, and never as a field that agreed with it.
    is_of_shapes = isinstance(test, ast.Compare) and all(
        isinstance(evaluate(test.left, *space), tuple) for space in spaces
    )
    for text, values in _known(method, test, records, outcomes) if is_of_shapes else ():
        if [a or b for a, b in zip(values, differ, strict=True)] == outcomes:
            # Shapes differ where their last dimensions do, also if no run had that.
            other = None if last is None else _comparison(method, test, records, last)
            return text if other is None else f"{text} or {other}"
    return None


def _followed(method: Method, test: ast.expr, spaces: Any) -> str | None:
    """A comparison of two shapes that only ever differ in their last dimension."""
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1:
        return None
    sides = (test.left, test.comparators[0])
    texts = [method.kept.last_of(side) for side in sides]
    if not isinstance(test.ops[0], ast.Eq | ast.NotEq) or None in texts:
        return None
    try:
        shapes = [[evaluate(side, *space) for side in sides] for space in spaces]
    except UnknownValueError:
        return None
    if any(one[:-1] != other[:-1] for one, other in shapes):
        return None
    one, other = (operand(str(text), ast.Compare) for text in texts)
    return f"{one} {'==' if isinstance(test.ops[0], ast.Eq) else '!='} {other}"


def _last_dimensions(test: ast.expr, spaces: Any) -> tuple[list[int], list[int]] | None:
    """The last dimensions of two shapes that are compared."""
    if not (
        isinstance(test, ast.Compare)
        and len(test.comparators) == 1
        and isinstance(test.ops[0], ast.NotEq)
    ):
        return None
    found: tuple[list[int], list[int]] = ([], [])
    for node, values in zip((test.left, test.comparators[0]), found, strict=True):
        for space in spaces:
            value = evaluate(node, *space)
            if not isinstance(value, tuple) or not value:
                return None
            values.append(value[-1])
    return found


def _comparison(method: Method, test: Any, records: Any, last: Any) -> str | None:
    """The last dimensions of two shapes, compared; None where both have the same expression."""
    texts = [
        method.kept.last_of(side) or method.solve(records, values, "features", (), test)
        for side, values in zip((test.left, test.comparators[0]), last, strict=True)
    ]
    one, other = (operand(text, ast.Compare) for text in texts)
    return None if one == other else f"{one} != {other}"


def _known(
    method: Method, test: ast.expr, records: Sequence[Making], outcomes: Sequence[bool]
) -> Iterator[tuple[str, list[bool]]]:
    """Fields and names that are one value where the condition is false."""
    names = {
        f"self.{f.name}": [r.fields.get(f.name) for r in records]
        for f in method.plan.fields
        if f.name not in method.plan.mode_fields
    }
    names |= {name: [r.env.get(name) for r in records] for name in sorted(method.visible(test))}
    for text, values in names.items():
        if not all(isinstance(v, int | str | tuple | bool | float) for v in values):
            continue
        usual = [v for v, outcome in zip(values, outcomes, strict=True) if not outcome]
        rare = usual[0]
        if len(set(map(repr, values))) < 2:
            continue
        if isinstance(rare, bool):
            yield (text if not rare else f"not {text}"), [v != rare for v in values]
        else:
            yield f"{text} != {rare!r}", [v != rare for v in values]
