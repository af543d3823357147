"""Layers that are given `**` arguments: what a dict of the constructor or of a field holds."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import binding

from ._function_plans import FunctionPlan
from ._layers import Layer
from ._method import Method
from ._plans import Slot
from ._refusals import LayerNotRewritableError, NotRewritableError


def rest_of(
    method: Method, slot: Slot, cls: type, layer: Layer, keyword: ast.keyword
) -> tuple[str, set[str]]:
    """What follows `**`, and the names that it gives: they go to the layer as they are.

    `keyword` has the `**` arguments. Raises NotRewritableError if NNX's layer takes them in another
    way, or only the call knows them.
    """
    value, plan = keyword.value, method.plan
    is_own = (
        isinstance(plan, FunctionPlan) and isinstance(value, ast.Name) and value.id == plan.rest
    )
    if not is_own and not _is_read_alone(method, slot, value):
        raise LayerNotRewritableError("layer-rest", slot.node)
    given: set[str] = set()
    refused = {*layer.renames, *layer.modes, *layer.unsupported, *layer.dropped, *layer.sizes}
    if not is_own:
        # The call of a function gives up the name; a dict is given on as it is.
        refused.add("name")
    for making in slot.makings:
        arguments = _arguments(method, slot, making, value)
        given |= set(arguments)
        nones = [name for name in arguments if arguments[name] is None]
        refused |= {name for name in nones if layer.refuses_none(cls, name)}
    if given & refused:
        if is_own:
            raise NotRewritableError("layer-rest-differs", slot.node)
        raise LayerNotRewritableError("layer-rest-differs", slot.node)
    if is_own:
        return ast.unparse(value), given
    return method.init_text(value, slot.makings), given


def _arguments(method: Method, slot: Slot, making: Making, value: ast.expr) -> Mapping[str, Any]:
    try:
        found = evaluate(value, {**method.namespace, **making.env}, making.fields)
    except UnknownValueError:
        found = None
    if not isinstance(found, Mapping):
        raise LayerNotRewritableError("layer-rest", slot.node)
    return found


def _is_read_alone(method: Method, slot: Slot, value: ast.expr) -> bool:
    """Whether a dict has one value that a constructor knows: nothing changes it on the way."""
    if method.taint.touches(value):
        return False
    if not isinstance(value, ast.Name):
        return True
    source = method.source
    bound = binding(method.node, value.id)
    if not bound:
        return True
    read = [
        each
        for each in ast.walk(method.node)
        if isinstance(each, ast.Name) and each.id == value.id and isinstance(each.ctx, ast.Load)
    ]
    parents = [source.parents[each] for each in read]
    if any(isinstance(each, ast.Attribute) or _is_written(each) for each in parents):
        raise NotRewritableError("layer-rest-changes", slot.node)
    around = [*source.ancestors(slot.node)]
    # The conditions around both hold for both.
    sets = [each for each in bound if not (isinstance(each, ast.If) and each in around)]
    is_bound_once = len(sets) == 1 and isinstance(sets[0], ast.Assign)
    return is_bound_once and all(isinstance(each, ast.keyword) for each in parents)


def _is_written(node: ast.AST) -> bool:
    """Whether an item is set or deleted."""
    return isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
