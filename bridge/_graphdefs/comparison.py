"""Whether GraphDefs are the same to every program: their static parts, compared strictly."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from bridge._equality.contents import contents
from bridge._flax import graphdefs
from bridge._flax.objects import DATA_ATTRIBUTES, OBJECT_STATES, attributes_dict


def is_equal(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    """As Flax compares them."""
    mine = a.num_leaves, a.nodes, a.attributes
    return mine == (b.num_leaves, b.nodes, b.attributes)


def hold_the_same(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any], *, identities: bool = False) -> bool:
    """Whether static attributes of equal GraphDefs are the same to every program.

    Args:
      a: a GraphDef.
      b: another one.
      identities: whether objects that can be written into must be the same ones.
    """
    pairs: list[tuple[Any, Any]] = [(static_parts(a), static_parts(b))]
    differing: list[tuple[Any, Any]] = []
    while pairs:
        mine, theirs = pairs.pop()
        kind = type(mine)
        if mine is theirs:
            continue
        if kind is not type(theirs):
            return False
        if kind is DATA_ATTRIBUTES:
            pairs.append((attributes_dict(mine), attributes_dict(theirs)))
        elif kind is dict and len(mine) == len(theirs):
            # Equal ones have equal keys, which are names.
            pairs += zip(mine.values(), map(theirs.get, mine), strict=True)
        elif kind is graphdefs.IndexesPytreeDef:
            pairs += [(mine.key_index, theirs.key_index), (mine.treedef, theirs.treedef)]
        elif kind is jax.tree_util.PyTreeDef:
            pairs += [(mine.node_data(), theirs.node_data())]
            pairs += zip(mine.children(), theirs.children(), strict=True)
        elif kind is tuple:
            pairs += zip(mine, theirs, strict=True)
        elif kind not in _ATOMS:
            differing.append((mine, theirs))
    if not differing:
        return True
    found, wanted = (contents(side) for side in zip(*differing, strict=True))
    return found.key == wanted.key and (not identities or found.identities == wanted.identities)


def static_parts(graphdef: nnx.GraphDef[Any]) -> tuple[Any, ...]:
    """Its metadata and static attributes."""
    metadata = [getattr(node, "metadata", None) for node in graphdef.nodes]
    return *metadata, *static_attributes(graphdef)


def static_attributes(graphdef: nnx.GraphDef[Any]) -> list[Any]:
    attributes: Any = graphdef.attributes
    return [kind.value for _, kind in attributes if isinstance(kind, _STATIC)]


# Equal ones of one type are the same.
_ATOMS = frozenset({int, bool, str, bytes, type(None), type, *OBJECT_STATES})


_STATIC = graphdefs.Static
