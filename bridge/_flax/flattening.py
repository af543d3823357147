"""A module as its GraphDef and its leaves, and the module made of them again."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from flax import nnx

from . import graphdefs
from .graphdefs import is_object
from .objects import STATE


def flatten(module: object) -> tuple[nnx.GraphDef[Any], list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in its order.

    `nnx.split` would sort the leaves into a nested State, which would then have to be taken apart.
    """
    graphdef, state = nnx.flatten(module, graph=True)
    return graphdef, list(state.leaves)


class Built(NamedTuple):
    """A module made of a GraphDef and leaves.

    Attributes:
      module: the module, or whatever the root of the GraphDef is.
      variables: the Variable that holds a leaf, for each of them; None for a bare array.
      objects: the modules and other NNX objects in it.
    """

    module: Any
    variables: list[nnx.Variable[Any] | None]
    objects: list[nnx.Pytree]


class GraphDefBuilder:
    """Makes the modules of a GraphDef in graph mode.

    `nnx.unflatten` makes them, but would give all modules the same static lists, dicts and sets.

    Attributes:
      leaves: type and metadata of the Variable for each leaf, None for a bare array.
      has_only_objects: whether every node is an NNX object or a Variable, and no
        static attribute is a container of its own. All that can change in such a module are the
        attributes and flags of objects, and the values and metadata of Variables.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any]):
        # Not the GraphDef, which may keep this.
        self._nodes: Any = graphdef.nodes
        self._attributes: Any = graphdef.attributes
        self.leaves: list[tuple[type[nnx.Variable[Any]], dict[str, Any]] | None] = []
        self._objects: list[int] = []
        # The indices of the static attributes that are containers, or have some in them.
        self._own = [
            i
            for i, (_, item) in enumerate(self._attributes)
            if isinstance(item, graphdefs.Static) and _copied(item.value) is not item.value
        ]
        self.has_only_objects = not self._own
        for path, item in graphdefs.decoded(graphdef):
            if graphdefs.stores_leaf(item):
                is_variable = isinstance(item, graphdefs.VariableDef)
                self.leaves.append((item.type, dict(item.metadata)) if is_variable else None)
            elif is_object(item):
                self._objects.append(item.index)
            elif not isinstance(item, _NO_CONTAINERS) and path[-1:] != (STATE,):
                self.has_only_objects = False

    def build(self, leaves: Iterable[Any]) -> Built:
        """Makes the module; the inverse of `flatten`.

        The leaves are Variables, or their values, and bare arrays, in the order of the GraphDef.
        """
        held: list[Any] = []
        variables: list[nnx.Variable[Any] | None] = []
        for leaf, of in zip(leaves, self.leaves, strict=True):
            held.append(leaf if of is None else _variable(leaf, *of))
            variables.append(None if of is None else held[-1])
        attributes = self._attributes
        if self._own:
            attributes = [*attributes]
            for i in self._own:
                name, item = attributes[i]
                attributes[i] = name, graphdefs.Static(_copied(item.value))
        nodes: Any = {}
        graphdef = nnx.GraphDef(self._nodes, attributes, len(held))
        module = nnx.unflatten(graphdef, held, index_ref=nodes)
        return Built(module, variables, [nodes[number] for number in self._objects])


_NO_CONTAINERS = (
    graphdefs.VariableDef,
    graphdefs.LeafAttr,
    graphdefs.NodeRef,
    graphdefs.Static,
)


def _variable(leaf: object, kind: type[nnx.Variable[Any]], metadata: dict[str, Any]) -> Any:
    """The Variable around a value, or the one that is given."""
    # Cheap test first: a failing `isinstance(leaf, nnx.Variable)` is slow.
    if not isinstance(leaf, jax.Array) and isinstance(leaf, nnx.Variable):
        return leaf
    return kind.from_metadata(leaf, metadata)


def _copied(value: Any) -> Any:
    """A value with lists, dicts and sets of its own; the value itself if there are none in it."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list or kind is set:
        return kind(map(_copied, value))
    if kind is tuple:
        items = tuple(map(_copied, value))
        return value if all(map(operator.is_, items, value)) else items
    return value
