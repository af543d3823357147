"""Modes that a constructor fixes, as the calls have them.

Linen's layer keeps the mode that it was made with. NNX's `train()` and `eval()` replace that of a
constructor, and leave that of a call alone.
"""

from __future__ import annotations

import ast

from bridge.rewrite.syntax._source import Edit, is_self, names_in, only_value

from ._method import Method
from ._plans import Slot


def fixed_mode(method: Method, slot: Slot, node: ast.expr) -> str | None:
    """The mode in the calls of a layer.

    `node` is the mode. Returns None if not every call of the layer is seen: then it stays in the
    constructor.
    """
    if slot.outer is not None or slot.lift is not None or slot.is_list:
        return None
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if method.is_setup:
        return _of_setup(method, slot, node)
    return method.call_text(node) if _is_called(method, slot) else None


def _is_called(method: Method, slot: Slot) -> bool:
    """Whether a layer is called where it is made, and used in no other way."""
    parent = method.source.parents[slot.node]
    if isinstance(parent, ast.Call) and parent.func is slot.node:
        return True
    named = [n for n in ast.walk(method.node) if isinstance(n, ast.Name) and n.id == slot.variable]
    loads = [n for n in named if isinstance(n.ctx, ast.Load)]
    return (
        len(named) - len(loads) == 1 and bool(loads) and all(_is_callee(method, n) for n in loads)
    )


def _of_setup(method: Method, slot: Slot, node: ast.expr) -> str | None:
    statement = method.source.statement_of(slot.node)
    if not isinstance(statement, ast.Assign) or statement.value is not slot.node:
        return None
    (target,) = statement.targets if len(statement.targets) == 1 else (None,)
    children = [p for p in method.program.plans.values() if method.plan in p.bases]
    if target is None or not is_self(target) or children:
        return None
    uses = [
        each
        for own in method.plan.methods.values()
        for each in ast.walk(own)
        if is_self(each, target.attr) and each is not target  # pyright: ignore
    ]
    if not uses or not all(_is_callee(method, each) for each in uses):
        return None
    edits = _without_locals(method, node)
    if edits is None:
        return None
    return method.source.render(node, [*method.references.edits(node), *edits])


def _is_callee(method: Method, node: ast.AST) -> bool:
    parent = method.source.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def _without_locals(method: Method, node: ast.expr) -> list[Edit] | None:
    """Edits that put `self.config` in the place of a local `config`; None if that is not all."""
    edits = []
    for each in ast.walk(node):
        if not isinstance(each, ast.Name) or each.id not in method.taint.pure:
            continue
        value = only_value(method.node, each.id)
        if value is None or names_in(value) != {"self"} or not _is_plain(value):
            return None
        edits.append(method.source.edit(each, method.source.render(value)))
    return edits


def _is_plain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
