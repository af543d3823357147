"""Checks a class for names that NNX modules reserve, and for features that they lack."""

from __future__ import annotations

import ast
import functools
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge import wrappers
from bridge.rewrite.syntax._source import is_self

from ._class_fields import default_node, module_default
from ._layers import Layer
from ._plans import ClassPlan, Field, Slot
from ._references import References
from ._refusals import LayerNotRewritableError, NotRewritableError

# What layers of Linen have, and those of NNX have not.
_OF_LINEN = ("apply", "init", "bind", "unbind", "variables", "scope")


def check_class(plan: ClassPlan, references: References) -> None:
    """Checks that a class uses nothing that NNX modules lack, or have for themselves.

    Raises NotRewritableError otherwise.
    """
    for name, node in plan.methods.items():
        if name in ("__init__", "__post_init__", "__getattr__", "__setattr__"):
            raise NotRewritableError("own-method", node, name=name)
        if name in ("train", "eval"):
            raise NotRewritableError("reserved-method", node, name=name)
    for field in plan.fields:
        if field.name in ("cls", "self", "rngs"):
            raise NotRewritableError("reserved-argument", field.node, name=field.name)
        if not _is_made_anew(plan, field, references):
            raise NotRewritableError("module-default", field.node)
    own = {n.arg for n in ast.walk(plan.node) if isinstance(n, ast.arg)}
    names = [n for n in ast.walk(plan.node) if isinstance(n, ast.Name)]
    own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    for name in names:
        if name.id not in own and isinstance(references.value_of(name), nn.Module):
            raise NotRewritableError("module-outside", name, name=name.id)
    for node in ast.walk(plan.node):
        if isinstance(node, ast.Name | ast.Attribute) and _is_to_linen(references.value_of(node)):
            raise NotRewritableError("mixed-class", node, name=ast.unparse(node))
    layers = {slot.attribute for slot in plan.slots.values() if slot.kind == "module"}
    for node in ast.walk(plan.node):
        if isinstance(node, ast.Attribute):
            value = references.value_of(node)
            if value in (nn.share_scope, nn.map_variables):
                raise NotRewritableError("no-function", node, name=node.attr)
            lines = references.program.records.lines.get(plan.source.file, set())
            ran = plan.source.statement_of(node).lineno in lines
            if not ran and node.attr in _OF_LINEN and _attribute_of(node.value) in layers:
                plan.note(node, f"{ast.unparse(node)} is read in a branch that did not run")
            lacking = {"scope", "path", "variables", "name", "parent"}
            lacking -= {f.name for f in plan.fields}
            if not is_self(node) or node.attr not in lacking:
                continue
            is_item = isinstance(plan.source.parents[node], ast.Subscript)
            if ran and node.attr == "variables" and is_item:
                # Read by their path, as tied weights are.
                continue
            if not ran:
                plan.note(node, f"self.{node.attr} is read in a branch that did not run")
            else:
                raise NotRewritableError("no-attribute", node, name=node.attr)


def _is_made_anew(plan: ClassPlan, field: Field, references: References) -> bool:
    """Whether the constructor can make the default of a field, if that is a module.

    It knows no sizes for it.
    """
    cls = module_default(field)
    if cls is None:
        return True
    made = references.program.plan_of(cls)
    is_known = made is not None and made.refusal is None and not made.sizes and not made.layer
    # None stands for the default.
    takes_none = "None" in field.annotation or "Optional" in field.annotation
    is_call = isinstance(default_node(field), ast.Call)
    return is_known and field.plan is plan and is_call and not takes_none


def _attribute_of(node: ast.expr) -> str | None:
    """The attribute of the module that an expression reads, None if it reads another thing."""
    return node.attr if isinstance(node, ast.Attribute) and is_self(node) else None


def _is_to_linen(value: Any) -> bool:
    """Whether something makes a Linen module of an NNX class."""
    if isinstance(value, type):
        return issubclass(value, wrappers.ToLinen | nnx.bridge.ToLinen)
    makers = (wrappers.to_linen, wrappers.to_linen_class, nnx.bridge.to_linen)
    return any(value is each for each in makers)


def check_layer(layer: Layer, slot: Slot, bound: functools.partial[Any] | None) -> None:
    """Checks that a layer is given nothing that NNX's has no place for.

    `bound` is the partial that is called, None if a class is. Raises NotRewritableError otherwise.
    """
    if layer.name == "GroupNorm" and any(m.made.get("axis_name") for m in slot.makings):
        raise NotRewritableError("named-axis-norm", slot.node)
    for name in layer.unsupported if bound is not None else ():
        if bound is not None and bound.keywords.get(name) is not None:
            raise LayerNotRewritableError("no-argument", slot.node, layer=layer.name, name=name)
