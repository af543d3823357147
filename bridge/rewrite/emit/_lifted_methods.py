"""Methods under a lifted transform, as decorators of NNX."""

from __future__ import annotations

import ast
import functools
from typing import Any

from flax import linen as nn

from bridge.rewrite.plan._references import References

_ABSENT = object()


def decorated(references: References, node: ast.expr, method: ast.FunctionDef) -> str | None:
    """The decorator of NNX in the place of one of Linen.

    Args:
        references: what names stand for.
        node: the decorator.
        method: what it decorates.

    Returns:
        Its text, None if there is none that does the same.
    """
    value = references.value_of(node)
    given = method.args
    if value in (nn.remat, nn.jit) and not given.defaults and not given.kwonlyargs:
        return "nnx.remat" if value is nn.remat else "nnx.jit"
    if not isinstance(node, ast.Call) or not node.args:
        return None
    if references.value_of(node.func) is not functools.partial:
        return None
    if references.value_of(node.args[0]) is not nn.scan or len(node.args) > 1:
        return None
    return _scan(references, {str(k.arg): k.value for k in node.keywords}, method)


def _scan(references: References, options: Any, method: ast.FunctionDef) -> str | None:
    """A loop over time, all turns of which share the parameters."""
    values = {name: _value(references, node) for name, node in options.items()}
    known = {"variable_broadcast", "split_rngs", "in_axes", "out_axes", "variable_axes"}
    names = [each.arg for each in method.args.args][2:]
    splits = values.get("split_rngs", {})
    if (
        _ABSENT in values.values()
        or not values.keys() <= known
        or values.get("variable_broadcast") != "params"
        or values.get("variable_axes")
        or not isinstance(splits, dict)
        or any(splits.values())
        or method.args.defaults
        or method.args.kwonlyargs
    ):
        return None
    axes = values.get("in_axes", 0)
    axes = axes if isinstance(axes, tuple) else (axes,) * len(names)
    out = values.get("out_axes", 0)
    if len(axes) != len(names) or not all(isinstance(a, int | None) for a in (*axes, out)):
        return None
    texts = ", ".join(["None", "nnx.Carry", *map(repr, axes)])
    return f"nnx.scan(in_axes=({texts}), out_axes=(nnx.Carry, {out!r}))"


def _value(references: References, node: ast.expr) -> Any:
    if references.value_of(node) is nn.broadcast:
        return None
    if isinstance(node, ast.Tuple):
        return tuple(_value(references, each) for each in node.elts)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _ABSENT
