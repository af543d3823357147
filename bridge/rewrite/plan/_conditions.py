"""The conditions of a compact method, as its constructor has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rewrite.observe._records import Making, Site
from bridge.rewrite.syntax._source import bound_in, only_value, operand, span_of

from ._method import Method
from ._plans import Slot
from ._refusals import NotRewritableError


def condition(method: Method, node: ast.If | ast.IfExp) -> str | None:
    """A condition as the constructor has it; None if it is about the call alone.

    Raises NotRewritableError if the constructor cannot know it.
    """
    in_test = set(ast.walk(node.test))
    slots = [
        s for s in method.slots if s.node not in in_test and node in method.source.ancestors(s.node)
    ]
    body = node.body if isinstance(node, ast.If) else []
    needed = any(bound_in(s) & method.used for s in body) or method.kept.has_updates(node)
    if not method.taint.touches(node.test):
        return method.init_text(node.test, ())
    if not slots and not needed:
        return "True"
    makings, test = _records(method, node), node.test
    if isinstance(test, ast.Name):
        # What the name was set to, if that happens once and not in a block.
        test = only_value(method.node, test.id) or test
    text = _predicate(method, test, makings)
    if text is not None:
        method.used |= method.names_of(text)
        return text
    try:
        return method.init_text(test, makings)
    except NotRewritableError:
        _check_always(method, node, slots)
        return None


def _check_always(method: Method, node: ast.If | ast.IfExp, slots: Sequence[Slot]) -> None:
    """The layers of a branch that an argument of the call decides: they are always there."""
    records, cls = method.program.records, method.plan.cls
    ran = (i for i in records.of_class(cls) if any(c.method == method.node.name for c in i.calls))
    owners = {(each.run, each.path) for each in ran}
    for slot in slots:
        if slot.kind == "module" and {(m.run, m.owner) for m in slot.makings} != owners:
            raise NotRewritableError("call-decides", node)
    method.plan.note(node, "layers that depend on an argument of the call are always made")


def _records(method: Method, node: ast.If | ast.IfExp) -> list[Making]:
    """The moments at which a condition was decided."""
    records, place = method.program.records, (method.source.file, node.test.lineno)
    site = Site(method.source.file, span_of(node.test))
    found = [
        Making("condition", run, 0, site, owner, instance.fields, env, {})
        for (run, owner, *line), envs in records.conditions.items()
        if tuple(line) == place
        if (instance := records.instances.get((run, owner))) is not None
        for env in envs
    ]
    if not found:
        raise NotRewritableError("condition-unseen", node)
    return found


def _predicate(method: Method, test: ast.expr, records: Sequence[Making]) -> str | None:
    """An expression that is as true as the condition was in every record.

    `records` are the moments at which it was decided. Returns None if no expression was found or
    the condition always went one way.
    """
    followed = _followed(method, test, records)
    if followed is not None:
        return followed
    found = method.values(test, records)
    outcomes = list(map(bool, found or ()))
    if len(set(outcomes)) < 2:
        return None
    last = _last_dimensions(method, test, records)
    differ = [a != b for a, b in zip(*last, strict=True)] if last else [False] * len(outcomes)
    if last is not None and differ == outcomes:
        return _comparison(method, test, records, last)
    # Only strides and the like make shapes differ that no expression gives: any other condition is
    # written as it is, with its sizes, and never as a field that agreed with it.
    left = method.values(test.left, records) if isinstance(test, ast.Compare) else None
    is_of_shapes = left is not None and all(isinstance(each, tuple) for each in left)
    for text, values in _known(method, test, records, outcomes) if is_of_shapes else ():
        if [a or b for a, b in zip(values, differ, strict=True)] == outcomes:
            # Shapes differ where their last dimensions do, also if no run had that.
            other = None if last is None else _comparison(method, test, records, last)
            return text if other is None else f"{text} or {other}"
    return None


def _followed(method: Method, test: ast.expr, records: Sequence[Making]) -> str | None:
    """A comparison of two shapes that only ever differ in their last dimension."""
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1:
        return None
    sides = (test.left, test.comparators[0])
    texts = [method.kept.last_of(side) for side in sides]
    if not isinstance(test.ops[0], ast.Eq | ast.NotEq) or None in texts:
        return None
    ones, others = (method.values(side, records) for side in sides)
    if ones is None or others is None or [x[:-1] for x in ones] != [x[:-1] for x in others]:
        return None
    one, other = (operand(str(text), ast.Compare) for text in texts)
    return f"{one} {'==' if isinstance(test.ops[0], ast.Eq) else '!='} {other}"


def _last_dimensions(
    method: Method, test: ast.expr, records: Sequence[Making]
) -> list[list[int]] | None:
    """The last dimensions of two shapes that are compared."""
    match test:
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            shapes = [method.values(side, records) for side in (left, right)]
        case _:
            return None
    if not all(own and all(isinstance(x, tuple) and x for x in own) for own in shapes):
        return None
    return [[shape[-1] for shape in own or ()] for own in shapes]


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
