"""Blocks of a method that no trace reached, where they make layers."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from bridge.rewrite.plan._function_plans import functions_in
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import (
    COMPREHENSIONS,
    FUNCTIONS,
    Edit,
    Source,
    is_docstring,
    is_free,
    is_self,
    names_in,
)

RAISES = "a branch that did not run raises NotImplementedError"
"""The note about such a block."""


def dead_blocks(method: Method) -> list[list[ast.stmt]]:
    """The blocks of a method that make layers and did not run.

    Raises NotRewritableError if such a layer is in an expression.
    """
    found: list[list[ast.stmt]] = []
    lines = method.lines
    made = {s.node for s in (*method.slots, *method.own_slots)}
    apart = {*functions_in(method.program, method.source, method.node), *method.plan.maker_methods}
    for node in ast.walk(method.node):
        if (
            not isinstance(node, ast.Call)
            or is_free(node)
            or node in made
            or not apart.isdisjoint(method.source.ancestors(node))
            or not _makes(method, node)
        ):
            continue
        statement = method.source.statement_of(node)
        inner = [
            a for a in method.source.ancestors(node) if isinstance(a, COMPREHENSIONS + FUNCTIONS)
        ]
        if statement.lineno in lines and not any(
            isinstance(i, ast.Lambda | ast.FunctionDef) and i is not method.node for i in inner
        ):
            outer = next((a for a in method.source.ancestors(node) if a in made), None)
            if outer is not None or isinstance(node.func, ast.Call):
                continue
            if _choice_of(method, node) is not None:
                continue
            raise NotRewritableError("expression-not-run", node)
        block = _block_of(method, statement, lines)
        if block is not None and block not in found:
            found.append(block)
    return found


class DeadChoice(NamedTuple):
    """A conditional expression of `setup` with a branch that makes a layer and did not run.

    `is_body` says whether that branch is the first one.
    """

    node: ast.IfExp
    is_body: bool


def dead_choices(method: Method) -> list[DeadChoice]:
    """Such expressions, each the whole value of an assignment."""
    lines = method.lines
    made = {s.node for s in method.slots}
    found: list[DeadChoice] = []
    for node in ast.walk(method.node):
        if isinstance(node, ast.Call) and node not in made and _makes(method, node):
            choice = _choice_of(method, node)
            if choice is not None and choice.node.lineno in lines and choice not in found:
                found.append(choice)
    return found


def _choice_of(method: Method, node: ast.AST) -> DeadChoice | None:
    choice = method.source.parents[node]
    if not method.is_setup or not isinstance(choice, ast.IfExp) or node is choice.test:
        return None
    is_value = isinstance(method.source.parents[choice], ast.Assign)
    return DeadChoice(choice, node is choice.body) if is_value else None


def _makes(method: Method, node: ast.Call) -> bool:
    if method.references.makes_layer(node.func):
        return True
    for function, name in method.plan.maker_methods.items():
        if isinstance(node.func, ast.Name):
            if node.func.id == name and method.node in method.source.ancestors(function):
                return True
        elif function in method.plan.methods.values() and is_self(node.func, name):
            return True
    if is_never_called(method, node) or _is_of_none(method, node):
        return True
    lines = method.lines
    return (isinstance(node.func, ast.Call) and node.lineno not in lines) or (
        is_self(node.func, "param") or is_self(node.func, "variable")
    )


def _is_of_none(method: Method, node: ast.Call) -> bool:
    """Whether a field that is None in every run is called for a layer, as in `self.norm()(x)`."""
    around = method.source.parents[node]
    if not method.is_setup and not (isinstance(around, ast.Call) and around.func is node):
        return False
    instances = method.program.records.of_class(method.plan.cls)
    try:
        values = [evaluate(node.func, {}, each.fields) for each in instances]
    except UnknownValueError:
        return False
    return bool(values) and all(each is None for each in values)


def is_never_called(method: Method, node: ast.Call) -> bool:
    """Whether an argument of the call decides that a layer of `setup` is called, and no run did.

    Without a call Linen's layer has no weights, so that the constructor does not make it either.
    """
    if not is_self(node.func):
        return False
    source, name = method.source, node.func.attr  # pyright: ignore
    around = list(source.ancestors(node))
    function = next((a for a in around if isinstance(a, ast.FunctionDef)), None)
    if function is None or source.statement_of(node).lineno in method.lines:
        return False
    given = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)} - {"self"}
    if not any(isinstance(a, ast.If) and names_in(a.test) & given for a in around):
        return False
    slots = [slot for slot in method.plan.slots.values() if slot.is_attribute(name)]
    made = [method.program.records.made_by(m) for slot in slots for m in slot.makings]
    return (
        bool(slots)
        and all(slot.kind == "module" for slot in slots)
        and not any(each and each.calls for each in made)
    )


def _block_of(method: Method, statement: ast.AST, lines: Collection[int]) -> list[ast.stmt] | None:
    """The outermost block around a statement that did not run."""
    best: list[ast.stmt] | None = None
    while statement is not method.node:
        parent = method.source.parents[statement]
        for block in blocks_of(parent):
            if statement in block and not any(
                n in lines for s in block for n in range(s.lineno, (s.end_lineno or 0) + 1)
            ):
                best = [s for s in block if not is_docstring(s)]
        statement = parent
    if best is None:
        raise NotRewritableError("expression-not-run", statement)
    return best


def in_place_of(source: Source, block: list[ast.stmt], text: str) -> Edit:
    """A statement in the place of a block, which may be an `elif`."""
    begin = source.start(block[0])
    if source.data[begin : begin + 4] == b"elif":
        body: Any = block[0]
        text = f"else:\n{' ' * body.body[0].col_offset}{text}"
    return Edit(begin, source.end(block[-1]), text)


def block_of(source: Source, node: ast.stmt) -> list[ast.stmt]:
    """The list of statements that a statement is in."""
    return next(block for block in blocks_of(source.parents[node]) if node in block)


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements that a statement has."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
