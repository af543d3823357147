"""Finds expressions that need only the dimensions of arguments.

Examples are `x.shape[-1] // 4` and `partial(nn.Dense, x.shape[-1])`. A constructor that is told
these dimensions can compute them as the program does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator

from bridge._train_eval import MODE_FIELDS

from ._evaluate import KNOWN_CALLS
from ._source import shape_item

_COMPUTING = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Compare)
# Calls whose results keep dimensions for what they will make.
_PARTIALS = ("partial", "functools.partial")
# The name of an argument, and a dimension of it; counted from its end where it is negative.
Dimension = tuple[str, int]


class Dimensions:
    """The dimensions of arguments in a method, while the arguments are what the call was given."""

    def __init__(self, method: ast.FunctionDef, arguments: Collection[str]) -> None:
        self._arguments = arguments
        self._bound: dict[str, list[int]] = {}
        for each in ast.walk(method):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self._bound.setdefault(each.id, []).append(each.lineno)
        self._in_loops = {
            inner
            for each in ast.walk(method)
            if isinstance(each, ast.For | ast.While | ast.AsyncFor)
            for inner in ast.walk(each)
        }
        self._names = {
            name: found
            for each in ast.walk(method)
            if isinstance(each, ast.Assign)
            for name, found in self._named(each)
            if len(self._bound[name]) == 1 and each not in self._in_loops
        }

    def of(self, node: ast.AST) -> Dimension | None:
        """The dimension that an expression is, by itself or by its name; None for another one."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        found = shape_item(node) if isinstance(node, ast.expr) else None
        return found if found is not None and self._is_given(found[0], node) else None

    def computes(self, node: ast.AST, touches: Callable[[ast.AST], bool]) -> bool:
        """Whether an expression computes with dimensions, and needs nothing else of the call.

        `touches` says whether an expression depends on the call.
        """
        if isinstance(node, ast.Call):
            is_partial = ast.unparse(node.func) in _PARTIALS
            is_plain = not any(isinstance(each, ast.Starred) for each in node.args)
            is_known = ast.unparse(node.func) in KNOWN_CALLS and not node.keywords
            if not is_plain or not (is_known or is_partial):
                return False
        elif not isinstance(node, _COMPUTING):
            return False
        return all(
            self.of(part) is not None or not touches(part) or self.computes(part, touches)
            for part in _parts(node)
        )

    def _named(self, statement: ast.Assign) -> Iterator[tuple[str, Dimension]]:
        target, value = statement.targets[0], statement.value
        if len(statement.targets) > 1:
            return
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for each, own in pairs:
            found = shape_item(own)
            if isinstance(each, ast.Name) and found and self._is_given(found[0], statement):
                yield each.id, found
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Attribute)
            and value.attr == "shape"
            and isinstance(value.value, ast.Name)
            and self._is_given(value.value.id, statement)
        ):
            parts = target.elts
            for place, each in enumerate(parts):
                before = any(isinstance(part, ast.Starred) for part in parts[:place])
                after = any(isinstance(part, ast.Starred) for part in parts[place:])
                if isinstance(each, ast.Name):
                    # A part that takes any number of dimensions is on one side alone.
                    number = place if after and not before else place - len(parts)
                    yield each.id, (value.value.id, number)

    def _is_given(self, name: str, node: ast.AST) -> bool:
        """Whether a name still is the argument at a place."""
        bound = self._bound.get(name, [])
        line: int = node.lineno  # pyright: ignore
        return name in self._arguments and (
            not bound or (min(bound) >= line and node not in self._in_loops)
        )


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that one is made of."""
    if isinstance(node, ast.Call):
        yield from node.args
        yield from (each.value for each in node.keywords if each.arg not in MODE_FIELDS)
        return
    yield from (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
