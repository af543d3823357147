"""Moves into a model what the initialisation of its copy has created."""

from __future__ import annotations

from typing import Any

from flax import nnx

from bridge._conversion.linen_attributes import CREATED_ATTRIBUTES, LinenHolder
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import is_note
from bridge._flax.variables import assign_raw_value, raw_value

from .snapshot import Snapshot, fill, is_deleted


def adopt(module: nnx.Module, made: nnx.Module) -> None:
    """Gives a model the state that its initialised copy has and it lacks.

    The model gets what the copy's nodes hold, as if it had made the call itself, and keeps as much
    of it as it keeps of such a call. Its own objects and values stay as they are. Every object of
    the copy must be at its path in the model.
    """
    copies = dict(nnx.iter_graph(made, graph=True))
    pairs = [
        (node, copy)
        for path, node in nnx.iter_graph(module, graph=True)
        if type(copy := copies[path] if path in copies else _at(made, path)) is type(node)
    ]
    originals = {id(copy): node for node, copy in pairs}
    snapshot = Snapshot(nodes_below(module))
    for node, copy in pairs:
        if isinstance(node, nnx.Variable):
            if is_deleted(raw_value(node)):
                # The call has donated it, and as in a concrete call its new value stays.
                assign_raw_value(node, raw_value(copy))
        elif isinstance(node, list):
            fill(node, [_original(item, originals) for item in copy])
        elif isinstance(node, dict | nnx.Pytree):
            held, new = (node, copy) if isinstance(node, dict) else (vars(node), vars(copy))
            contents = {
                n: x if n in CREATED_ATTRIBUTES or is_note(n) else _original(x, originals)
                for n, x in new.items()
            }
            fill(held, contents)
        if isinstance(node, LinenHolder):
            for count, made_count in zip(node.stream_counts(), copy.stream_counts(), strict=True):
                assign_raw_value(count, raw_value(made_count))
    snapshot.keep_created()


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    """What is at a path, None if nothing is.

    A node has one path in the graph, but another one in a copy if a new submodule that refers to it
    comes first.
    """
    for key in path:
        if isinstance(node, nnx.Pytree):
            node = vars(node).get(str(key))
        else:
            node = node.get(key) if isinstance(node, dict) else None
    return node


def _original(value: object, originals: dict[int, Any]) -> Any:
    """A value of the copy, with the model's own objects in it."""
    if id(value) in originals:
        return originals[id(value)]
    for node in nodes_below(value).objects:
        attributes = vars(node)
        attributes.update({n: originals.get(id(v), v) for n, v in attributes.items()})
    return value
