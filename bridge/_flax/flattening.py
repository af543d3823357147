"""A module as its GraphDef and its leaves, and the module made of them again."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from . import graphdefs
from .graphdefs import is_object
from .objects import PYTREE_NOTES, ObjectState, set_states


def flatten(module: object) -> tuple[nnx.GraphDef[Any], list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in its order.

    `nnx.split` would sort the leaves into a nested State, out of which they would have to be taken
    again.
    """
    indices = graphdefs.RefMap()
    graphdef, state = nnx.flatten(module, ref_index=indices, graph=True)
    _put_back_references(graphdef, indices)
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
    """Makes the modules of a GraphDef.

    `nnx.unflatten` makes the objects and the Variables. Static attributes are put in afterwards,
    because it would give all modules the same lists, dicts and sets.

    Args:
      graphdef: a GraphDef in graph mode.

    Attributes:
      leaves: type and metadata of the Variable for each leaf, None for a bare array.
      has_only_objects: whether every node is an NNX object or a Variable, and no
        static attribute is a container of its own. All that can change in such a module are the
        attributes and flags of objects, and the values and metadata of Variables.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any]):
        self.leaves: list[tuple[type[nnx.Variable[Any]], dict[str, Any]] | None] = []
        # By the number of an object: what all modules have in common, and what each has of its own.
        self._shared: dict[int, dict[str, Any]] = {}
        self._own: list[tuple[int, str, Any]] = []
        # The indices of the containers that are static items of others.
        self._items: list[int] = []
        self._states: dict[int, tuple[bool, bool]] = {}
        self.has_only_objects = True
        nodes: dict[tuple[Any, ...], Any] = {}
        self._attributes: list[tuple[Any, Any]] = []
        for path, item in graphdefs.decoded(graphdef):
            owner: Any = nodes.get(path[:-1])
            if is_object(owner) and self._is_put_in(owner.index, str(path[-1]), item):
                rest = owner.num_attributes - 1
                nodes[path[:-1]] = dataclasses.replace(owner, num_attributes=rest)
                continue
            self._note(item)
            is_node = not isinstance(item, graphdefs.LeafAttr | graphdefs.Static)
            if is_node:
                nodes[path] = item
            if isinstance(item, graphdefs.Static) and _copied(item.value) is not item.value:
                self._items.append(len(self._attributes))
            if path:
                self._attributes.append((path[-1], graphdefs.NodeAttr() if is_node else item))
        self._nodes = list(nodes.values())
        self._objects = [item.index for item in self._nodes if is_object(item)]

    def _is_put_in(self, owner: int, name: str, item: Any) -> bool:
        """Whether an attribute is put into its object afterwards."""
        value: Any = None
        if isinstance(item, graphdefs.Static):
            value = item.value
        elif name in PYTREE_NOTES and isinstance(item, graphdefs.NodeDef):
            value = nnx.unflatten(nnx.GraphDef([item], [], 0), [])
        else:
            return False
        if type(value) is ObjectState:
            self._states[owner] = value.initializing, value.is_setup
        elif _copied(value) is not value:
            self._own.append((owner, name, value))
            self.has_only_objects = False
        else:
            self._shared.setdefault(owner, {})[name] = value
        return True

    def _note(self, item: Any) -> None:
        if graphdefs.stores_leaf(item):
            is_variable = isinstance(item, graphdefs.VariableDef)
            of = (item.type, dict(item.metadata)) if is_variable else None
            self.leaves.append(of)
        self.has_only_objects &= isinstance(item, _NO_CONTAINERS) or is_object(item)

    def build(self, leaves: Iterable[Any]) -> Built:
        """Makes the module; the inverse of `flatten`.

        Args:
          leaves: Variables, or their values, and bare arrays, in the order of the GraphDef.
        """
        held: list[Any] = []
        variables: list[nnx.Variable[Any] | None] = []
        for leaf, of in zip(leaves, self.leaves, strict=True):
            held.append(leaf if of is None else _variable(leaf, *of))
            variables.append(None if of is None else held[-1])
        nodes: Any = {}
        attributes = self._attributes
        if self._items:
            attributes = [*attributes]
            for i in self._items:
                key, item = attributes[i]
                attributes[i] = key, graphdefs.Static(_copied(item.value))
        graphdef = nnx.GraphDef(self._nodes, attributes, len(held))
        module = nnx.unflatten(graphdef, held, index_ref=nodes)
        for number, attributes in self._shared.items():
            vars(nodes[number]).update(attributes)
        set_states(nodes, self._states)
        for number, name, value in self._own:
            vars(nodes[number])[name] = _copied(value)
        return Built(module, variables, [nodes[number] for number in self._objects])


_NO_CONTAINERS = (graphdefs.VariableDef, graphdefs.LeafAttr, graphdefs.NodeRef)


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


def _put_back_references(graphdef: nnx.GraphDef[Any], indices: Mapping[Any, int]) -> None:
    """Gives Variables the references back that others hold too.

    Flax 0.12 takes such a reference out of every Variable but the first.
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
