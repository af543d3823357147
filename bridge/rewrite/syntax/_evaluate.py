"""The value of an expression at a moment that was recorded.

Nothing of the program runs: names, fields, items, arithmetic and comparisons are all there is.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.rewrite.observe._records import Shape

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
KNOWN_CALLS: Mapping[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "int": int,
    "tuple": tuple,
    "sum": sum,
    "abs": abs,
    "list": list,
    "math.prod": math.prod,
    "np.prod": math.prod,
    "numpy.prod": math.prod,
    "range": range,
    "round": round,
    "math.ceil": math.ceil,
    "math.sqrt": math.sqrt,
    "bool": bool,
}
_PLAIN = (int, float, str, bool, tuple, list, dict, type(None))


class UnknownValueError(Exception):
    """The value is not known."""


def evaluate(node: ast.AST, env: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """The value of an expression.

    `env` has the local variables and globals, and `fields` the attributes of `self`. Raises
    UnknownValueError if the expression is not of a known kind, or if it fails.
    """
    try:
        return _evaluate(node, env, fields)
    except UnknownValueError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise UnknownValueError(str(error)) from error


def _evaluate(node: ast.AST, env: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    go = functools.partial(_evaluate, env=env, fields=fields)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return env[node.id]
        case ast.Attribute(value=ast.Name(id="self")):
            return fields[node.attr]
        case ast.Attribute():
            return _attribute(go(node.value), node.attr)
        case ast.Subscript():
            return go(node.value)[go(node.slice)]
        case ast.Slice():
            return slice(
                *(
                    None if each is None else go(each)
                    for each in (node.lower, node.upper, node.step)
                )
            )
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](go(node.left), go(node.right))
        case ast.UnaryOp(op=ast.Not()):
            return not go(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            return -go(node.operand)
        case ast.BoolOp():
            return _bool(node, go)
        case ast.Compare():
            values = [go(node.left), *map(go, node.comparators)]
            return all(
                _COMPARE[type(op)](a, b)
                for op, a, b in zip(node.ops, values, values[1:], strict=False)
            )
        case ast.Tuple() | ast.List():
            values = [go(each) for each in node.elts]
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.IfExp():
            return go(node.body) if go(node.test) else go(node.orelse)
        case ast.Call(keywords=[]) if (name := ast.unparse(node.func)) in KNOWN_CALLS:
            return KNOWN_CALLS[name](*map(go, node.args))
    raise UnknownValueError(ast.unparse(node))


def _bool(node: ast.BoolOp, go: Callable[[ast.AST], Any]) -> Any:
    value: Any = None
    for each in node.values:
        value = go(each)
        if bool(value) != isinstance(node.op, ast.And):
            return value
    return value


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, Shape):
        return getattr(value, name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return getattr(value, name)
    if isinstance(value, Mapping) and name in value:
        return value[name]
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    if type(value).__name__ in ("ConfigDict", "FrozenConfigDict"):
        return getattr(value, name)
    raise UnknownValueError(name)


def is_size(value: Any) -> bool:
    """Whether a value is a size, or several."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True
    return (
        isinstance(value, tuple | list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    )


def same_dtype(node: ast.AST, spaces: Sequence[tuple[Mapping[str, Any], Any]]) -> str | None:
    """`x.dtype` as text, where it is one type in all spaces of names and fields; else None."""
    if not (
        isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and node.attr == "dtype")
    ):
        return None
    try:
        found = {evaluate(node, names, fields) for names, fields in spaces}
    except (UnknownValueError, TypeError):
        return None
    is_one = len(found) == 1 and isinstance(next(iter(found)), np.dtype)
    return f'"{found.pop()}"' if is_one else None


def partial_of(
    node: ast.AST, env: Mapping[str, Any], fields: Mapping[str, Any]
) -> functools.partial[Any] | None:
    """The partial that an expression is, None if it is another thing or unknown."""
    try:
        found = evaluate(node, env, fields)
    except UnknownValueError:
        return None
    return found if isinstance(found, functools.partial) else None
