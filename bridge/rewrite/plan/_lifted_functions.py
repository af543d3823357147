"""Lifted transforms of functions: where they are, and which layers they are used on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from bridge.rewrite.syntax._source import Source, span_of

from ._plans import ClassPlan, FunctionLift, Program, Slot
from ._references import References


def find_functions(program: Program, plan: ClassPlan) -> list[FunctionLift]:
    """The lifted transforms of functions in a class, in the order of their first calls."""
    first, last = plan.node.lineno, plan.node.end_lineno or 0
    found: dict[Any, FunctionLift] = {}
    for call in program.records.functions:
        site = call.lifted.site
        if site is None or site.file != plan.source.file or not first <= site.span.line <= last:
            continue
        if site.span not in found:
            node: Any = plan.source.call_at(site.span) or _decorator(plan, site.span)
            if node is None:
                continue
            function = _function(plan.source, node)
            found[site.span] = FunctionLift(call.lifted, node, function, [])
        found[site.span].calls.append(call)
    return list(found.values())


def unseen_functions(plan: ClassPlan, references: References) -> Iterator[ast.Call]:
    """The lifted transforms of functions that a conditional expression may choose and never did."""
    seen = {each.node for each in plan.functions}
    for choice in ast.walk(plan.node):
        for branch in (choice.body, choice.orelse) if isinstance(choice, ast.IfExp) else ():
            calls = [each for each in ast.walk(branch) if isinstance(each, ast.Call)]
            for node in filter(references.is_lifted, calls):
                if node not in seen and _function(plan.source, node) is not None:
                    yield node


def _decorator(plan: ClassPlan, span: Any) -> ast.expr | None:
    for node in ast.walk(plan.node):
        for each in getattr(node, "decorator_list", ()):
            if span_of(each) == span:
                return each
    return None


def _function(source: Source, node: ast.expr) -> ast.FunctionDef | ast.Lambda | None:
    """What a transform is given, through other transforms and partials."""
    parent = source.parents[node]
    if isinstance(parent, ast.FunctionDef) and node in parent.decorator_list:
        return parent
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    if isinstance(node, ast.Lambda):
        return node
    if not isinstance(node, ast.Name):
        return None
    for each in source.ancestors(node):
        for own in getattr(each, "body", ()) if isinstance(each, ast.FunctionDef) else ():
            for inner in ast.walk(own):
                if isinstance(inner, ast.FunctionDef) and inner.name == node.id:
                    return inner
    return None


def first_argument(function: Any) -> str:
    """The name of the module that a function is given."""
    given = [*function.args.posonlyargs, *function.args.args]
    return given[0].arg if given else "self"


def functions_of(plan: ClassPlan, slot: Slot) -> list[FunctionLift]:
    """The functions that are given what a slot makes, or that it is made in.

    Where a module's own method stacks its variables, everything that it makes is stacked.
    """
    return [
        each
        for each in plan.functions
        if any(
            making.run == call.run
            and (
                making.path == call.path
                or call.holds(making)
                or (making.owner == call.path and each.lifted.is_stacking)
            )
            for call in each.calls
            for making in slot.makings
        )
    ]


def calls_inside(slot: Slot) -> Iterator[ast.Call]:
    """The calls of a layer in the functions that are given it."""
    for each in slot.functions:
        is_given = any(
            making.run == call.run and making.path == call.path
            for call in each.calls
            for making in slot.makings
        )
        if not is_given or each.function is None:
            continue
        name = first_argument(each.function)
        for node in ast.walk(each.function):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == name
            ):
                yield node
