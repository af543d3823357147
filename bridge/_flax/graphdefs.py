"""What Flax makes a GraphDef of, and how it takes containers apart.

`nnx.GraphDef` is public, and what is in it is not: `nnx.split` and `nnx.merge` are all that a
program needs. The bridge keeps GraphDefs among Linen variables, so it has to know where their
leaves belong.
"""

from __future__ import annotations

from .promises import part

_GRAPHLIB = "flax.nnx.graphlib"

# The nodes of a GraphDef, in the order in which they are met.
NodeDef = part(_GRAPHLIB, "NodeDef")
VariableDef = part(_GRAPHLIB, "VariableDef")
ArrayRefDef = part(_GRAPHLIB, "ArrayRefDef")
NodeRef = part(_GRAPHLIB, "NodeRef")
# What its attributes are.
NodeAttr = part(_GRAPHLIB, "NodeAttr")
LeafAttr = part(_GRAPHLIB, "LeafAttr")
Static = part(_GRAPHLIB, "Static")
# How an object says which of its attributes are what.
DataElem = part(_GRAPHLIB, "DataElem")
StaticElem = part(_GRAPHLIB, "StaticElem")
# The metadata of a container that JAX knows.
IndexesPytreeDef = part(_GRAPHLIB, "IndexesPytreeDef")
# Nodes by identity.
RefMap = part(_GRAPHLIB, "RefMap")
# How a type that Flax or JAX was told of is taken apart and put together.
GraphNodeImpl = part(_GRAPHLIB, "GraphNodeImpl")
get_node_impl = part(_GRAPHLIB, "get_node_impl")
get_node_impl_for_type = part(_GRAPHLIB, "get_node_impl_for_type")
