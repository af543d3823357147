"""Names the parts of a Flax GraphDef, and decodes them in one place.

`nnx.GraphDef` is public, and what is in it is not: `nnx.split` and `nnx.merge` are all that a
program needs. The bridge keeps GraphDefs among Linen variables, so it has to know where their
leaves belong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from .promises import part

_GRAPHLIB = "flax.nnx.graphlib"


def _has(*names: str) -> Callable[[Any], bool]:
    """Checks that a class has these fields."""

    def check(cls: Any) -> bool:
        return {*names} <= {field.name for field in dataclasses.fields(cls)}

    return check


# The nodes of a GraphDef, in the order in which they are met.
NodeDef = part(_GRAPHLIB, "NodeDef", _has("type", "index", "num_attributes", "metadata"))
VariableDef = part(_GRAPHLIB, "VariableDef", _has("type", "index", "metadata", "array_refdef"))
ArrayRefDef = part(_GRAPHLIB, "ArrayRefDef", lambda cls: cls(1, None).index == 1)
NodeRef = part(_GRAPHLIB, "NodeRef", _has("index"))
# What its attributes are.
NodeAttr = part(_GRAPHLIB, "NodeAttr")
LeafAttr = part(_GRAPHLIB, "LeafAttr")
Static = part(_GRAPHLIB, "Static", lambda cls: cls(1).value == 1)


def decoded(graphdef: nnx.GraphDef[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is at each path of a GraphDef in graph mode, in the order of its leaves.

    Yields:
      The path, and a `NodeDef` for what has something below it, a `VariableDef`, a `Static` item, a
      `LeafAttr` for a bare array, an `ArrayRefDef` for an array reference, or a `NodeRef` for what
      was met before.
    """
    # The definition of one bare array has no nodes.
    first: Any = graphdef.nodes[0] if graphdef.nodes else LeafAttr()
    return _decoded((), first, iter(graphdef.nodes[1:]), iter(graphdef.attributes))


def _decoded(
    path: tuple[Any, ...], item: Any, nodes: Iterator[Any], attributes: Iterator[Any]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, item
    for _ in range(item.num_attributes if isinstance(item, NodeDef) else 0):
        key, kind = next(attributes)
        below = next(nodes) if isinstance(kind, NodeAttr) else kind
        yield from _decoded((*path, key), below, nodes, attributes)


def leaves_of(graphdef: nnx.GraphDef[Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """The path and the item of `decoded` for each leaf, in order."""
    return [(path, item) for path, item in decoded(graphdef) if stores_leaf(item)]


def stores_leaf(item: Any) -> bool:
    """Whether a leaf is stored for an item of `decoded`."""
    # None is stored for a reference that was met before.
    if isinstance(item, VariableDef):
        return not isinstance(item.array_refdef, NodeRef)
    return isinstance(item, LeafAttr | ArrayRefDef)


def is_object(item: object) -> bool:
    """Whether an item of `decoded` is an NNX object."""
    kind = getattr(item, "type", None) if isinstance(item, NodeDef) else None
    return isinstance(kind, type) and issubclass(kind, nnx.Pytree)
