"""A GraphDef taken apart once, so that its module can be made again at little cost.

`nnx.merge` walks through the definition for every module that it makes. A `ToLinen` makes one at
each call, so here the walk is done once and what it finds is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from . import graphdefs
from .graphdef_nodes import (
    ArrayLeaf,
    ContainerNode,
    GraphDefNode,
    MetBefore,
    StaticItem,
    VariableNode,
    decode,
)
from .objects import OBJECT_STATES, ObjectState, StaticObjectState
from .self_references import Tie, untied


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
    """What is known of the modules of a GraphDef before their leaves are.

    Args:
      graphdef: a GraphDef in graph mode.

    Attributes:
      has_only_objects: whether every node is an NNX object or a Variable with a plain value, and no
        static attribute is a container of its own. All that can change in such a module are the
        attributes and flags of objects, and the values and metadata of Variables.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any]):
        self._root = _part(decode(graphdef))
        self.has_only_objects = self._root.is_plain

    def build(self, leaves: Iterable[Any], plain: Container[int] = ()) -> Built:
        """Makes the module; the inverse of `flatten`.

        Args:
          leaves: Variables, or their values, and bare arrays, in the order of the GraphDef.
          plain: the indices of leaves whose Variables are to be plain ones, whatever the GraphDef
            says: neither references nor hijax Variables.
        """
        build = _Build(leaves, plain)
        module = self._root.build(build)
        values = untied([tied for _, _, tied in build.tied], build.by_index)
        for (attributes, name, _), value in zip(build.tied, values, strict=True):
            attributes[name] = value
        return Built(module, build.variables, build.objects)


class _Build:
    """One module in the making, and its nodes so far by their index in the GraphDef."""

    __slots__ = ("by_index", "leaves", "objects", "plain", "tied", "variables")

    def __init__(self, leaves: Iterable[Any], plain: Container[int] = ()):
        self.leaves = iter(leaves)
        self.plain = plain
        self.by_index: dict[int, Any] = {}
        self.variables: list[nnx.Variable[Any] | None] = []
        self.objects: list[nnx.Pytree] = []
        # They may refer to nodes that are made later.
        self.tied: list[tuple[dict[str, Any], str, Tie]] = []


class _Part(Protocol):
    """Something in a module that can be made.

    Attributes:
      is_plain: see `GraphDefBuilder.has_only_objects`.
    """

    is_plain: bool

    def build(self, build: _Build) -> Any: ...


class _Leaf:
    """A bare array, or a reference, which others may share."""

    def __init__(self, index: int | None = None):
        self._index = index
        self.is_plain = index is None

    def build(self, build: _Build) -> Any:
        leaf = next(build.leaves)
        build.variables.append(None)
        if self._index is not None:
            build.by_index[self._index] = leaf
        return leaf


class _Again:
    """A node that was met before."""

    is_plain = True

    def __init__(self, index: int):
        self._index = index

    def build(self, build: _Build) -> Any:
        return build.by_index[self._index]


class _Constant:
    """A static attribute or item."""

    is_plain = True

    def __init__(self, value: Any):
        self.value = value

    def build(self, build: _Build) -> Any:
        return self.value


class _Tied(_Constant):
    """A static attribute that refers to nodes of the module."""

    is_plain = False


class _Containers:
    """A static attribute or item that a call could write into: a list, a dict or a set."""

    is_plain = False

    def __init__(self, value: Any):
        self._value = value

    def build(self, build: _Build) -> Any:
        return _copied(self._value)


class _Variable:
    """A Variable around its value."""

    def __init__(self, node: VariableNode):
        self._type = node.type
        self._metadata = dict(node.metadata)
        self._is_special = self._metadata["hijax"] or self._metadata["ref"]
        self._index = node.number
        self._reference: Any = node.reference
        self._has_leaf = node.has_leaf
        self.is_plain = node.reference is None and not self._is_special

    def build(self, build: _Build) -> Any:
        nodes = build.by_index
        value = next(build.leaves) if self._has_leaf else nodes[self._reference]
        if self._reference is not None:
            nodes[self._reference] = value
        # Asked first, as `isinstance(…, nnx.Variable)` takes its time to say no.
        if isinstance(value, jax.Array) or not isinstance(value, nnx.Variable):
            metadata = self._metadata
            if self._is_special and len(build.variables) in build.plain:
                metadata = {**metadata, "hijax": False, "ref": False}
            value = self._type.from_metadata(value, metadata)
        nodes[self._index] = value
        if self._has_leaf:
            build.variables.append(value)
        return value


class _Object:
    """A module, or another object with attributes, which may refer to itself."""

    def __init__(self, node: ContainerNode, parts: list[tuple[Any, _Part]]):
        self._type = node.type
        self._index: Any = node.number
        # The integer keys of `nnx.List` are attributes as well.
        named = [(str(key), part) for key, part in parts]
        self._static = {name: p.value for name, p in named if isinstance(p, _Constant)}
        self._tied = [(name, p.value) for name, p in named if isinstance(p, _Tied)]
        self._parts = [(name, p) for name, p in named if not isinstance(p, _Constant)]
        self.is_plain = all(part.is_plain for _, part in parts)

    def build(self, build: _Build) -> Any:
        made = object.__new__(self._type)
        build.by_index[self._index] = made
        build.objects.append(made)
        attributes = vars(made)
        attributes.update(self._static)
        for name, part in self._parts:
            attributes[name] = part.build(build)
        for name, tied in self._tied:
            build.tied.append((attributes, name, tied))
        return made


class _ObjectState:
    """What an NNX object keeps for NNX itself."""

    is_plain = True

    def __init__(self, state: Any):
        self._noted = StaticObjectState.of(state)

    def build(self, build: _Build) -> Any:
        return ObjectState(*self._noted)


class _Registered:
    """A node of a type that Flax or JAX was told of: a container, an object of another library."""

    is_plain = False

    def __init__(self, node: ContainerNode, parts: list[tuple[Any, _Part]]):
        self._metadata = node.metadata
        self._index: Any = node.number
        self._parts = parts
        self._impl: Any = graphdefs.get_node_impl_for_type(node.type)

    def build(self, build: _Build) -> Any:
        if not isinstance(self._impl, graphdefs.GraphNodeImpl):
            return self._impl.unflatten(self._children(build), self._metadata)
        made = self._impl.create_empty(self._metadata)
        build.by_index[self._index] = made
        self._impl.init(made, self._children(build))
        return made

    def _children(self, build: _Build) -> list[tuple[Any, Any]]:
        return [(key, part.build(build)) for key, part in self._parts]


def _part(node: GraphDefNode) -> _Part:
    """What makes a node, and everything below it."""
    if isinstance(node, VariableNode):
        return _Variable(node)
    if isinstance(node, ArrayLeaf):
        return _Leaf(node.number)
    if isinstance(node, StaticItem):
        return _static_part(node.value)
    if isinstance(node, MetBefore):
        return _Again(node.number)
    parts = [(key, _part(child)) for key, child in node.children]
    if isinstance(node.type, type) and issubclass(node.type, nnx.Pytree):
        return _Object(node, parts)
    registered = _Registered(node, parts)
    made = None if parts else registered.build(_Build(()))
    return _ObjectState(made) if type(made) in OBJECT_STATES else registered


def _static_part(value: Any) -> _Part:
    if type(value) in OBJECT_STATES:
        return _ObjectState(value)
    if type(value) is Tie:
        return _Tied(value)
    return (_Constant if _copied(value) is value else _Containers)(value)


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
