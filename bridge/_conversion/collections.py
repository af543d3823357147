"""Names the collections that have a role of their own, and finds the bridge's own leaves in them.

A collection of the user's may have any name, so a collection's name alone decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from flax import nnx

from bridge._types import GraphDef, Variables

from .neutral import Path, laid_over, nest, walk

# Linen's own collections. Those in OUTPUTS come from a call and are not state of the model.
PARAMS = "params"
OUTPUTS = frozenset({"intermediates", "perturbations"})

# The collection that holds GraphDefs, and the name that a ToLinen gives to its own.
STATIC = "nnx"
GRAPHDEF = "graphdef"
# The collection of an NNX module's arrays that are in no Variable: their type says nothing, as it
# changes under tracing. In it a Variable is one of the user's.
ARRAYS = "nnx_arrays"

GraphDefs: TypeAlias = tuple[tuple[Path, GraphDef], ...]


def holds_state(collection: str) -> bool:
    """Whether training updates a collection from call to call."""
    return collection != PARAMS and collection not in OUTPUTS


def is_static(collection: str, path: Path, leaf: object) -> bool:
    """Whether a leaf of Linen variables is a GraphDef, or what a checkpoint has in its place.

    A GraphDef is code, not data, and comes back from a file as an empty mapping or as None.
    """
    if collection != STATIC:
        return False
    if isinstance(leaf, Mapping):
        return not leaf
    if leaf is None:
        return path[-1:] == (GRAPHDEF,)
    return isinstance(leaf, nnx.GraphDef)


def graphdefs_in(variables: Variables) -> GraphDefs:
    """The GraphDefs in Linen variables by path, hashable."""
    leaves = walk(variables.get(STATIC, {}))
    return tuple(item for item in leaves if isinstance(item[1], nnx.GraphDef))


def with_graphdefs(variables: Variables, graphdefs: GraphDefs) -> dict[str, Any]:
    """Linen variables and the GraphDefs that `graphdefs_in` found in others."""
    if not graphdefs:
        return dict(variables)
    return laid_over(variables, {STATIC: nest(dict(graphdefs))})


def with_static(variables: Variables, source: Variables) -> dict[str, Any]:
    """Linen variables, and what is static in the variables `source`."""
    static = {
        (STATIC, *path): leaf
        for path, leaf in (walk(source[STATIC], empty=True) if STATIC in source else ())
        if is_static(STATIC, path, leaf)
    }
    return laid_over(variables, nest(static))
