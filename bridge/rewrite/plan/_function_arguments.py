"""Calls of functions that make layers, without what the constructor was given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from bridge.rewrite.syntax._source import Edit, Source

from ._function_plans import FunctionPlan, bound


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
