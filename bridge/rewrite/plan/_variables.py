"""Parameters and variables of a Linen module as Variables."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from flax.linen import partitioning

from bridge.rewrite.observe._records import Making

from ._method import Method
from ._plans import Slot
from ._refusals import NotRewritableError
from ._slots import name_node


def variable_text(method: Method, slot: Slot) -> str:
    """The expression that makes the Variable of `self.param` or `self.variable`.

    Raises NotRewritableError if its collection has no Variable type with a name, or its arguments
    cannot be followed.
    """
    node = slot.node
    if any(isinstance(a, ast.Starred) for a in node.args) or any(
        k.arg is None for k in node.keywords
    ):
        raise NotRewritableError("variable-stars", node)
    name = name_node(slot)
    if not (_is_one(slot) or (slot.is_list and isinstance(name, ast.JoinedStr))):
        raise NotRewritableError("variable-names", node)
    if slot.kind == "param" and any(_is_tree(method, each) for each in slot.makings):
        raise NotRewritableError("parameter-tree", node)
    return _param(method, slot) if slot.kind == "param" else _state(method, slot)


def _is_one(slot: Slot) -> bool:
    """Whether a slot makes no more than one variable of a module, whatever its name."""
    if isinstance(name_node(slot), ast.Constant):
        return True
    owners = [(making.run, making.owner) for making in slot.makings]
    return not slot.is_list and len(owners) == len(set(owners))


def _is_tree(method: Method, making: Making) -> bool:
    """Whether a parameter is a tree of arrays."""
    found = method.program.records.variables[making.run].get("params", {})
    for name in (*(making.owner or ()), str(making.name)):
        found = found.get(name) if isinstance(found, Mapping) else None
    return isinstance(found, Mapping | list | tuple)


def _texts(method: Method, slot: Slot, skipped: int, *named: str) -> list[str]:
    """The arguments behind the name, the initialiser first."""
    given = list(slot.node.args[skipped:])
    texts = [method.init_text(each, slot.makings) for each in given]
    for keyword in slot.node.keywords:
        if keyword.arg in ("name", "col"):
            continue
        if keyword.arg == "unbox":
            raise NotRewritableError("variable-boxed", slot.node)
        if keyword.arg == "module":
            raise NotRewritableError("variable-of-module", slot.node)
        if keyword.arg == "axes" and _is_with_axes(method, slot.node):
            continue
        text = method.init_text(keyword.value, slot.makings)
        texts.append(text if keyword.arg in named else f"{keyword.arg}={text}")
    return texts


def _param(method: Method, slot: Slot) -> str:
    init, *rest = _texts(method, slot, 1, "init_fn")
    called = (
        init if _is_simple(slot.node.args[1] if len(slot.node.args) > 1 else None) else f"({init})"
    )
    made = f"{called}({', '.join(['rngs.params()', *rest])})"
    axes = [k.value for k in slot.node.keywords if k.arg == "axes"]
    if axes and _is_with_axes(method, slot.node):
        # These are logical names, and Linen asks for no mesh.
        named = method.init_text(axes[0], slot.makings)
        return f"nnx.Param({made}, out_sharding={named}, eager_sharding=False)"
    return f"nnx.Param({made})"


def _is_with_axes(method: Method, node: ast.Call) -> bool:
    """Whether a call is that of Flax's `param_with_axes`."""
    return method.references.value_of(node.func) is partitioning.param_with_axes


def _state(method: Method, slot: Slot) -> str:
    node = slot.node
    collection = node.args[0] if node.args else None
    if not (isinstance(collection, ast.Constant) and isinstance(collection.value, str)):
        raise NotRewritableError("collection-name", node)
    init, *rest = _texts(method, slot, 2, "init_fn")
    kind = type_text(collection.value)
    argument = node.args[2] if len(node.args) > 2 else None
    if isinstance(argument, ast.Lambda) and not argument.args.args and not rest:
        body = method.init_text(argument.body, slot.makings)
        return f"{kind}({body})"
    called = init if _is_simple(argument) else f"({init})"
    return f"{kind}({called}({', '.join(rest)}))"


def _is_simple(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Call)


_TYPES = {
    "params": "nnx.Param",
    "batch_stats": "nnx.BatchStat",
    "cache": "nnx.Cache",
    "intermediates": "nnx.Intermediate",
}


def type_text(collection: str) -> str:
    """The Variable type of a collection."""
    known = _TYPES.get(collection)
    return known or f'registry.current().type_from_name("{collection}", create=True)'
