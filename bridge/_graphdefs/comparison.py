"""Whether GraphDefs are the same to every program: their static parts, compared strictly."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from bridge._equality.contents import Contents, contents, tell_by
from bridge._equality.walk import Walk
from bridge._flax import graphdefs
from bridge._flax.objects import DATA_ATTRIBUTES, OBJECT_STATES, StaticObjectState, attributes_dict
from bridge._flax.self_references import BoundCode


def is_equal(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    """As Flax compares them."""
    mine = a.num_leaves, a.nodes, a.attributes
    return mine == (b.num_leaves, b.nodes, b.attributes)


def told(graphdef: nnx.GraphDef[Any]) -> Contents:
    """What a GraphDef holds at this moment, for whoever made it, whatever its attributes are.

    Python's own `==` does not tell: two lambdas of one line are never equal, an array has none, and
    1 == 1.0 == True, which programs compute different things with.
    """
    shape: list[Any] = [graphdef.num_leaves]
    for node in graphdef.nodes:
        shape += _shape(node)
    for name, kind in graphdef.attributes:
        shape += (type(name), name, type(kind))
    held = contents(static_parts(graphdef), made=True)
    return held._replace(key=(*shape, *held.key))


def are_one(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    """Whether GraphDefs consist of the very same values: the quick answer, which may be a no."""
    if a.num_leaves != b.num_leaves or len(a.attributes) != len(b.attributes):
        return False
    if list(map(_shape, a.nodes)) != list(map(_shape, b.nodes)):
        return False
    for (mine, kind), (theirs, other) in zip(a.attributes, b.attributes, strict=True):
        if mine != theirs or type(kind) is not type(other):
            return False
    pairs: list[tuple[Any, Any]] = [(static_parts(a), static_parts(b))]
    while pairs:
        mine, theirs = pairs.pop()
        kind = type(mine)
        if mine is theirs:
            continue
        if kind is not type(theirs):
            return False
        if kind is DATA_ATTRIBUTES:
            pairs.append((attributes_dict(mine), attributes_dict(theirs)))
        elif kind is dict:
            if list(mine) != list(theirs):
                return False
            pairs += zip(mine.values(), theirs.values(), strict=True)
        elif kind is graphdefs.IndexesPytreeDef:
            pairs += [(mine.key_index, theirs.key_index), (mine.treedef, theirs.treedef)]
        elif kind is jax.tree_util.PyTreeDef:
            pairs += [(mine.node_data(), theirs.node_data())]
            pairs += [(mine.children(), theirs.children())]
        elif kind is tuple or kind is list:
            if len(mine) != len(theirs):
                return False
            pairs += zip(mine, theirs, strict=True)
        elif kind in OBJECT_STATES:
            if StaticObjectState.of(mine) != StaticObjectState.of(theirs):
                return False
        elif kind not in _ATOMS or mine != theirs:
            return False
    return True


def static_parts(graphdef: nnx.GraphDef[Any]) -> tuple[Any, ...]:
    """The types and the metadata of its nodes, and its static attributes."""
    parts: list[Any] = []
    for node in graphdef.nodes:
        parts += (getattr(node, "type", None), getattr(node, "metadata", None))
    return *parts, *static_attributes(graphdef)


def static_attributes(graphdef: nnx.GraphDef[Any]) -> list[Any]:
    attributes: Any = graphdef.attributes
    return [kind.value for _, kind in attributes if isinstance(kind, _STATIC)]


def _shape(node: Any) -> tuple[Any, ...]:
    """What a node is, but for its type and metadata."""
    reference = getattr(node, "array_refdef", None)
    number = getattr(reference, "index", None)
    return type(node), node.index, getattr(node, "num_attributes", None), type(reference), number


# Equal ones of one type are the same.
_ATOMS = frozenset({int, bool, str, bytes, type(None)})


_STATIC = graphdefs.Static


def _tell_code(walk: Walk, code: BoundCode) -> None:
    walk.header(BoundCode, code.code, id(code.scope), code.name, code.qualname)


tell_by(BoundCode, _tell_code)
