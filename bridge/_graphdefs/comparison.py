"""Whether GraphDefs are the same to every program: their static parts, compared strictly."""

from __future__ import annotations

from typing import Any, NamedTuple

from flax import nnx

from bridge._fingerprint import Fingerprint, Look, told_by
from bridge._flax import graphdefs
from bridge._flax.objects import OBJECT_STATES, attributes_dict
from bridge._flax.self_references import BoundCode


def is_equal(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    """As Flax compares them."""
    mine = a.num_leaves, a.nodes, a.attributes
    return mine == (b.num_leaves, b.nodes, b.attributes)


class Told(NamedTuple):
    """What a GraphDef holds.

    Attributes:
      fingerprint: its fingerprint.
      objects: as in `Look`, without containers, of which every module gets its own.
    """

    fingerprint: Fingerprint
    objects: list[Any]


def told(graphdef: nnx.GraphDef[Any]) -> Told:
    """What a GraphDef holds at this moment, for whoever made it, whatever its attributes are.

    Python's own `==` does not tell: two lambdas of one line are never equal, an array has none, and
    1 == 1.0 == True, which programs compute different things with.
    """
    look = Look(static_parts(graphdef), made=True)
    key, identities = look.fingerprint
    shape: list[Any] = [graphdef.num_leaves]
    nodes: Any = graphdef.nodes
    for node in nodes:
        # What a node is, but for its type and metadata.
        reference = getattr(node, "array_refdef", None)
        number = getattr(reference, "index", None)
        size = getattr(node, "num_attributes", None)
        shape += (type(node), node.index, size, type(reference), number)
    for name, kind in graphdef.attributes:
        shape += (type(name), name, type(kind))
    fingerprint = Fingerprint((*shape, *key), identities)
    return Told(fingerprint, [x for x in look.objects if type(x) not in _CONTAINERS])


def static_parts(graphdef: nnx.GraphDef[Any]) -> tuple[Any, ...]:
    """The types and the metadata of its nodes, and its static attributes."""
    parts: list[Any] = []
    for node in graphdef.nodes:
        parts += (getattr(node, "type", None), getattr(node, "metadata", None))
    return *parts, *static_attributes(graphdef)


def static_attributes(graphdef: nnx.GraphDef[Any]) -> list[Any]:
    attributes: Any = graphdef.attributes
    return [kind.value for _, kind in attributes if isinstance(kind, _STATIC)]


_CONTAINERS = (list, dict, set, frozenset, graphdefs.IndexesPytreeDef, *OBJECT_STATES)
_STATIC = graphdefs.Static

told_by(
    graphdefs.IndexesPytreeDef,
    lambda it: (tuple(attributes_dict(it.key_index).items()), it.treedef),
)
# Of the module that a function is defined in, its globals are the place.
told_by(BoundCode, lambda code: (code.code, id(code.scope), code.name, code.qualname))
