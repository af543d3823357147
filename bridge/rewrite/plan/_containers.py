"""The attributes that `setup` gives to what it makes, one by one or in lists and dicts."""

from __future__ import annotations

import ast

from bridge.rewrite.syntax._source import Source, binding, bound_in, grown_name, is_self
from bridge.rewrite.syntax._taint import SAME_ITEMS

from ._function_plans import called_function
from ._plans import ClassPlan, Program, Slot

CONTAINERS = {
    ast.List: "List",
    ast.Tuple: "List",
    ast.ListComp: "List",
    ast.Dict: "Dict",
    ast.DictComp: "Dict",
}


def stored_in(plan: ClassPlan, slot: Slot) -> tuple[str | None, bool]:
    """The attribute that `setup` puts what a slot makes into, and whether it is that alone.

    None if it puts it into no attribute; a container may be filled by its local name.
    """
    source, setup = plan.source, slot.method
    if setup.name != "setup":
        return None, False
    statement = source.statement_of(slot.node)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if target is not None and is_self(target):
        parent = source.parents[slot.node]
        parent = source.parents[parent] if isinstance(parent, ast.IfExp) else parent
        return target.attr, parent is statement  # pyright: ignore
    name = target.id if isinstance(target, ast.Name) else grown_name(statement)
    found = [
        (each.targets[0].attr, value)  # pyright: ignore
        for each in ast.walk(setup)
        if isinstance(each, ast.Assign) and is_self(each.targets[0])
        if isinstance(value := same_items(each.value), ast.Name) and value.id == name
    ]
    if slot.variable is None:
        return (found[0][0] if found else None), False
    own = [each for each in plan.slots.values() if each.method is setup]
    made = {source.statement_of(e.node) for e in own if e.variable == slot.variable}
    is_one = len(found) == 1 and made.issuperset(binding(setup, slot.variable))
    return (found[0][0], True) if is_one else (None, False)


def same_items(value: ast.expr) -> ast.expr:
    """What `tuple(items)` has the items of."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and (value.func.id in SAME_ITEMS and value.args)
    ):
        value = value.args[0]
    return value


def is_apart(source: Source, slot: Slot) -> bool:
    """Whether what a slot makes is handed on by a variable, in another statement."""
    statement = source.statement_of
    return slot.outer is not None and statement(slot.node) is not statement(slot.outer.node)


def held_attributes(program: Program, plan: ClassPlan, setup: ast.FunctionDef) -> dict[str, str]:
    """The attributes that hold several modules, with `List` or `Dict`."""
    slots = [slot for slot in plan.slots.values() if slot.method is setup]
    made = {slot.node for slot in slots}
    inside = _held_variables(setup, made)
    found: dict[str, str] = {}
    for node in ast.walk(setup):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if not is_self(target):
                continue
            value = same_items(node.value)
            kind = _several(program, slots, value)
            if not kind and isinstance(value, ast.GeneratorExp):
                kind = "List"
            elif not kind and isinstance(value, ast.Name):
                kind = inside.get(value.id, "")
            elif not kind and type(value) in CONTAINERS and made & {*ast.walk(value)}:
                kind = CONTAINERS[type(value)]
            if kind:
                found[target.attr] = kind  # pyright: ignore
    return found


def _several(program: Program, slots: list[Slot], value: ast.expr) -> str:
    """`List` or `Dict` for the call of a function that returns several layers."""
    slot = next((s for s in slots if s.node is value), None)
    function = called_function(program, slot) if slot is not None else None
    return function.returns_several if function is not None else ""


def _held_variables(setup: ast.FunctionDef, made: set[ast.Call]) -> dict[str, str]:
    """Local names of containers that modules are put in."""
    kinds: dict[str, str] = {}
    filled: set[str] = set()
    for node in ast.walk(setup):
        if isinstance(node, ast.Assign) and type(node.value) in CONTAINERS:
            for name in bound_in(node):
                kinds[name] = CONTAINERS[type(node.value)]
            if any(each in made for each in ast.walk(node.value)):
                filled |= bound_in(node)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    filled.add(target.value.id)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (node.func.attr in ("append", "extend", "insert"))
            and isinstance(node.func.value, ast.Name)
        ):
            filled.add(node.func.value.id)
    return {name: kind for name, kind in kinds.items() if name in filled}
