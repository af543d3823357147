"""The arguments of functions that make layers, between the constructor and the call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._function_plans import FunctionPlan, bound
from ._plans import LeftLinenError
from ._source import Edit, Source

if TYPE_CHECKING:
    from ._constructors import Constructor


def constructor_text(made: Constructor, plan: FunctionPlan) -> str:
    """What the constructor of a caller makes in the place of a call of a function.

    Raises:
        LeftLinenError: the function stays Linen.
    """
    slot, method = made.slot, made.method
    if plan.reason is not None or slot.outer is not None:
        raise LeftLinenError("a function outside of the class makes a layer of it", slot.node)
    given = dict(bound(plan, slot.node))
    positional = set(plan.arguments[: len(slot.node.args)])
    parts = []
    for name in plan.constructed:
        if name not in given:
            positional = set()
            continue
        text = method.init_text(given[name], slot.makings)
        parts.append(text if name in positional else f"{name}={text}")
    rest = [name for name in given if name not in (*plan.arguments, "name")]
    parts += [f"{name}={method.init_text(given[name], slot.makings)}" for name in rest]
    parts += [f"{name}={text}" for name, text in made.own_sizes(plan.sizes)]
    text = f"{plan.name_in_file}({', '.join([*parts, 'rngs=rngs'])})"
    is_alone = slot.method.name != "setup" and plan.returns_several
    return f"nnx.{plan.returns_several}({text})" if is_alone else text


def call_edits(source: Source, node: ast.Call, plan: FunctionPlan) -> Iterator[Edit]:
    """A call without the arguments that the constructor got."""
    keywords: dict[ast.expr, ast.keyword] = {k.value: k for k in node.keywords}
    parts: list[tuple[Any, bool]] = [
        (keywords.get(value, value), name in plan.dropped) for name, value in bound(plan, node)
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
