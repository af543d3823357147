"""Stacked layers in the constructor: `nnx.vmap` of what makes one, with keys for each."""

from __future__ import annotations

import ast
import json
from typing import Any

import jax
from flax import linen as nn

from bridge.rewrite.observe._records import Lifted, Path, Records, below

from ._axes import Axes, axis_texts
from ._method import Method
from ._options import STACKS
from ._plans import Slot
from ._refusals import NotRewritableError


def of_functions(method: Method, slot: Slot, made: str, *, wraps: bool) -> str:
    """What makes a layer that functions under transforms are given, or that is made in one.

    `method` is the method that the constructor's part is of. `made` is the expression that makes
    one layer. With `wraps`, something in the layer stays Linen. Raises NotRewritableError if NNX's
    transforms do not do the same.
    """
    if slot.functions and (wraps or slot.linen):
        raise NotRewritableError("transform-of-linen", slot.node)
    for each in reversed(slot.functions):
        if each.lifted.is_stacking:
            keywords = each.node.keywords if isinstance(each.node, ast.Call) else []
            length = (k.value for k in keywords if k.arg == STACKS[each.lifted.kind])
            made = stacked(method, slot, each.lifted, made, each.node, next(length, None))
    return made


def stacked(
    method: Method,
    slot: Slot,
    lifted: Lifted,
    made: str,
    call: ast.AST | None,
    length: ast.expr | None,
) -> str:
    """The expression that makes the layers of a transform.

    `method` is the method that the constructor's part is of. `made` is the expression that makes
    one layer, `call` is the call of the transform, and `length` is the expression for the number of
    layers. Raises NotRewritableError if NNX's transforms do not do the same.
    """
    records = method.program.records
    texts = axis_texts(call, lambda node: _axis_text(method, slot, node))
    axes = Axes(records, lifted, [(m.run, m.path or ()) for m in slot.makings], texts)
    options = [] if axes.made == "0" else [f"out_axes={axes.made}"]
    if lifted.options.get("metadata_params"):
        options.append(metadata(lifted))
    inside = ", ".join([f"lambda rngs: {made}", *options])
    keys = "broadcast" if axes.is_shared else "split"
    return f"nnx.vmap({inside})(rngs.{keys}({_length(method, slot, lifted, length)}))"


def _axis_text(method: Method, slot: Slot, node: ast.expr) -> str:
    if method.node not in method.source.ancestors(node):
        raise NotRewritableError("transform-setup-axis", node)
    return method.init_text(node, slot.makings)


def metadata(lifted: Lifted) -> str:
    """The metadata of the new axis for NNX's transform.

    Raises NotRewritableError if the metadata is more than a name.
    """
    given = dict(lifted.options["metadata_params"])
    name = given.get(nn.PARTITION_NAME)
    if set(given) != {nn.PARTITION_NAME} or not isinstance(name, str | None):
        raise NotRewritableError("transform-metadata", kind=lifted.kind)
    text = "None" if name is None else json.dumps(name)
    return f"transform_metadata={{nnx.PARTITION_NAME: {text}}}"


def _length(method: Method, slot: Slot, lifted: Lifted, node: ast.expr | None) -> str:
    name = STACKS[lifted.kind]
    if node is not None and method.node in method.source.ancestors(node):
        return method.init_text(node, slot.makings)
    value = lifted.options.get(name)
    if node is None and isinstance(value, int):
        return repr(value)
    records = method.program.records
    values = [_measured(records, m.run, m.path or (), lifted) for m in slot.makings]
    if len(set(values)) == 1:
        # An argument of the call that is as long, such as a batch, says nothing.
        return method.named(slot.makings, values, slot.node) or repr(values[0])
    return method.solve(slot.makings, values, name, slot.loops, slot.node)


def _measured(records: Records, run: int, path: Path, lifted: Lifted) -> Any:
    """How many there are, by the variables."""
    stacks = records.stacks_above(run, path)
    index = next(i for i, each in enumerate(stacks) if each.site == lifted.site)
    inside = below(records.variables[run], path, stacks[:index])
    for collection, axis in stacks[index].axes.items():
        for leaf in jax.tree.leaves(inside.get(collection, ())):
            return leaf.shape[axis]
    raise NotRewritableError("transform-empty", kind=lifted.kind)
