"""The one decoder of GraphDefs: their flat lists of nodes and attributes, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from . import graphdefs


class VariableNode(NamedTuple):
    """A Variable.

    Attributes:
      type: its class.
      metadata: its metadata.
      number: its number among the nodes that can be met again.
      reference: the number of the array reference that it holds, None if it holds a plain value.
      has_leaf: whether a leaf is stored for it. There is none for a reference that was met before.
    """

    type: type[nnx.Variable[Any]]
    metadata: Any
    number: int
    reference: int | None
    has_leaf: bool


class ContainerNode(NamedTuple):
    """An object, a list, a dict, or anything else with something below it.

    Attributes:
      type: its class.
      metadata: what Flax needs besides the children to make it.
      number: its number among the nodes that can be met again, None if it cannot be.
      children: the key and the node of each child, in order.
    """

    type: Any
    metadata: Any
    number: int | None
    children: tuple[tuple[Any, GraphDefNode], ...]


class ArrayLeaf(NamedTuple):
    """A bare array, for which a leaf is stored, or an array reference, which has a number."""

    number: int | None = None


class StaticItem(NamedTuple):
    """A static attribute or item."""

    value: Any


class MetBefore(NamedTuple):
    """The node of a number that came earlier in the same GraphDef."""

    number: int


GraphDefNode: TypeAlias = VariableNode | ContainerNode | ArrayLeaf | StaticItem | MetBefore


def decode(graphdef: nnx.GraphDef[Any]) -> GraphDefNode:
    """The tree of a GraphDef in graph mode; its leaves are stored in the order of a walk.

    `nnx.merge` reads the lists as well, and makes the module while it does.
    """
    nodes = iter(graphdef.nodes)
    first = next(nodes, None)
    # The definition of one bare array has no nodes.
    return ArrayLeaf() if first is None else _decode(first, nodes, iter(graphdef.attributes))


def nodes_of_arrays(root: GraphDefNode) -> list[tuple[tuple[Any, ...], VariableNode | ArrayLeaf]]:
    """The Variables and the bare arrays in a tree and their paths, in the order of the leaves."""
    found: list[tuple[tuple[Any, ...], VariableNode | ArrayLeaf]] = []
    _visit((), root, found)
    return found


# Not inside of its caller: a function that refers to itself by a cell is a cycle.
def _visit(path: tuple[Any, ...], node: GraphDefNode, found: list[Any]) -> None:
    # Most nodes are static attributes.
    if isinstance(node, VariableNode | ArrayLeaf):
        found.append((path, node))
    elif isinstance(node, ContainerNode):
        for key, child in node.children:
            if type(child) is not StaticItem:
                _visit((*path, key), child, found)


def _decode(definition: Any, nodes: Iterator[Any], attributes: Iterator[Any]) -> GraphDefNode:
    """One node, and everything below it."""
    if isinstance(definition, graphdefs.VariableDef):
        reference = definition.array_refdef
        return VariableNode(
            definition.type,
            definition.metadata,
            definition.index,
            None if reference is None else reference.index,
            not isinstance(reference, graphdefs.NodeRef),
        )
    if isinstance(definition, graphdefs.ArrayRefDef):
        return ArrayLeaf(definition.index)
    if not isinstance(definition, graphdefs.NodeDef):
        return MetBefore(definition.index)
    children: list[tuple[Any, GraphDefNode]] = []
    for _ in range(definition.num_attributes):
        key, kind = next(attributes)
        if isinstance(kind, graphdefs.Static):
            children.append((key, StaticItem(kind.value)))
        elif isinstance(kind, graphdefs.NodeAttr):
            children.append((key, _decode(next(nodes), nodes, attributes)))
        else:
            children.append((key, ArrayLeaf()))
    return ContainerNode(definition.type, definition.metadata, definition.index, tuple(children))
