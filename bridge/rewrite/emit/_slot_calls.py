"""Writes the uses of a slot: its attribute in `setup`, its calls in a compact method."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bridge.rewrite.plan._lifted_functions import calls_inside
from bridge.rewrite.plan._plans import ClassPlan, Slot
from bridge.rewrite.syntax._source import is_self, is_shadowed


def attribute_of(plan: ClassPlan, slot: Slot) -> str | None:
    """The attribute that a slot of `setup` alone is assigned to."""
    parent = plan.source.parents[slot.node]
    if isinstance(parent, ast.IfExp):
        parent = plan.source.parents[parent]
    if isinstance(parent, ast.Assign) and is_self(parent.targets[0]):
        return parent.targets[0].attr  # pyright: ignore
    return None


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
                and not is_shadowed(plan.source, each, slot.variable)
            ):
                yield each
    yield from calls_inside(slot)
