"""A module as its GraphDef and its leaves."""

from __future__ import annotations

from typing import Any

from flax import nnx

from . import graphdefs
from .self_references import tie


def flatten(module: Any) -> tuple[nnx.GraphDef[Any], list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in its order.

    `nnx.split` would sort the leaves into a nested State, out of which they would have to be taken
    again.
    """
    indices = graphdefs.RefMap()
    graphdef, state = nnx.flatten(module, ref_index=indices, graph=True)
    _put_back_references(graphdef, indices)
    return tie(graphdef, indices), list(state.leaves)


def _put_back_references(graphdef: nnx.GraphDef[Any], indices: Any) -> None:
    """Gives Variables the references back that others hold too.

    Flax 0.12.8 takes such a reference out of every Variable but the first.
    """
    definitions: Any = graphdef.nodes
    shared = [
        (node.index, node.array_refdef.index)
        for node in definitions
        if isinstance(node, graphdefs.VariableDef)
        and isinstance(node.array_refdef, graphdefs.NodeRef)
    ]
    if shared:
        nodes = {index: node for node, index in indices.items()}
        for index, reference in shared:
            nodes[index].set_raw_value(nodes[reference])
