"""What Flax makes a GraphDef of, and how it takes containers apart.

`nnx.GraphDef` is public, and what is in it is not: `nnx.split` and `nnx.merge` are all that a
program needs. The bridge keeps GraphDefs among Linen variables, so it has to know where their
leaves belong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .promises import part

_GRAPHLIB = "flax.nnx.graphlib"


def _has(*names: str) -> Callable[[Any], bool]:
    """Checks that a class has these fields."""

    def check(cls: Any) -> bool:
        is_dataclass = dataclasses.is_dataclass(cls)
        fields = [f.name for f in dataclasses.fields(cls)] if is_dataclass else cls._fields
        return {*names} <= {*fields}

    return check


def _tells_items(get_node_impl: Any) -> bool:
    """An implementation for a container tells its items; a leaf has none."""
    return get_node_impl([5]).node_dict([5]) == {0: 5} and get_node_impl(5) is None


# The nodes of a GraphDef, in the order in which they are met.
NodeDef = part(_GRAPHLIB, "NodeDef", _has("type", "index", "num_attributes", "metadata"))
VariableDef = part(_GRAPHLIB, "VariableDef", _has("type", "index", "metadata", "array_refdef"))
ArrayRefDef = part(_GRAPHLIB, "ArrayRefDef", lambda cls: cls(1, None).index == 1)
NodeRef = part(_GRAPHLIB, "NodeRef", _has("index"))
# What its attributes are.
NodeAttr = part(_GRAPHLIB, "NodeAttr")
LeafAttr = part(_GRAPHLIB, "LeafAttr")
Static = part(_GRAPHLIB, "Static", lambda cls: cls(1).value == 1)
# How an object says which of its attributes are what.
DataElem = part(_GRAPHLIB, "DataElem", lambda cls: cls(1).value == 1)
StaticElem = part(_GRAPHLIB, "StaticElem", lambda cls: cls(1).value == 1)
# The metadata of a container that JAX knows.
IndexesPytreeDef = part(_GRAPHLIB, "IndexesPytreeDef", _has("key_index", "treedef"))
# Nodes by identity.
RefMap = part(_GRAPHLIB, "RefMap", lambda cls: len(cls()) == 0)
# How a type that Flax or JAX was told of is taken apart and put together.
GraphNodeImpl = part(_GRAPHLIB, "GraphNodeImpl", _has("create_empty", "init"))
get_node_impl = part(_GRAPHLIB, "get_node_impl", _tells_items)
get_node_impl_for_type = part(
    _GRAPHLIB, "get_node_impl_for_type", lambda function: function(int) is None
)
