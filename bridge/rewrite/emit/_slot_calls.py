"""Finds the calls of layers: by their expression, their variable, or a list that they are in."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rewrite.plan._function_plans import FunctionPlan, bound
from bridge.rewrite.plan._lifted_functions import calls_inside
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import ClassPlan, Slot
from bridge.rewrite.syntax._source import Edit, Source, is_self, is_shadowed, items_of


def calls_of(plan: ClassPlan, slot: Slot) -> Iterator[ast.Call]:
    """The calls, by the expression itself or its variable."""
    parent = plan.source.parents[slot.node]
    if isinstance(parent, ast.Call) and parent.func is slot.node:
        yield parent
    if slot.variable:
        for each in ast.walk(slot.method):
            if (
                isinstance(each, ast.Call)
                and isinstance(each.func, ast.Name)
                and each.func.id == slot.variable
                and not is_shadowed(plan.source, each, slot.variable, slot.method)
            ):
                yield each
    yield from calls_inside(slot)


def item_calls(slots: Sequence[Slot], method: Method) -> Iterator[tuple[Slot, ast.Call]]:
    """The calls of layers under lifted transforms that are in a list."""
    lists = {n: s for s in slots if s.lift for n in [_list_of(method, s)] if n}
    for node in ast.walk(method.node):
        if not isinstance(node, ast.Call):
            continue
        own: Any = node.func
        if isinstance(own, ast.Name):
            values = _values_of(method.source, own)
        else:
            values = own.value if isinstance(own, ast.Subscript) else None
        if values is not None and is_self(values) and values.attr in lists:  # pyright: ignore
            yield lists[values.attr], node  # pyright: ignore


def _values_of(source: Source, name: ast.Name) -> ast.expr | None:
    """The list that the innermost loop around a name takes it from."""
    for around in source.ancestors(name):
        loops = [around] if isinstance(around, ast.For) else getattr(around, "generators", ())
        for loop in loops:
            for each, values in items_of(loop.target, loop.iter):
                if isinstance(each, ast.Name) and each.id == name.id:
                    return values
    return None


def _list_of(method: Method, slot: Slot) -> str | None:
    """The attribute of the list that a slot alone fills."""
    statement = method.source.statement_of(slot.node)
    if (
        isinstance(statement, ast.Assign)
        and is_self(statement.targets[0])
        and statement.value is not slot.node
    ):
        return statement.targets[0].attr  # pyright: ignore
    return None


def call_edits(source: Source, node: ast.Call, plan: FunctionPlan) -> Iterator[Edit]:
    """A call without the arguments that the constructor got."""
    keywords: dict[ast.expr, ast.keyword] = {k.value: k for k in node.keywords}
    parts: list[tuple[Any, bool]] = [
        (keywords.get(value, value), name in plan.known) for name, value in bound(plan, node)
    ]
    parts.sort(key=lambda part: source.start(part[0]))
    for index, (part, is_dropped) in enumerate(parts):
        if not is_dropped:
            continue
        if any(not gone for _, gone in parts[:index]):
            yield Edit(source.end(parts[index - 1][0]), source.end(part), "")
        elif index + 1 < len(parts):
            yield Edit(source.start(part), source.start(parts[index + 1][0]), "")
        else:
            yield Edit(source.start(part), source.end(part), "")
