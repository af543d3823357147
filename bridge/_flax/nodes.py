"""Every node below a module: modules, Variables and the containers between them, each once."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from .graphdefs import get_node_impl
from .objects import DATA_ATTRIBUTES, OBJECT_STATES
from .promises import holds

# Most attributes are of these types, and none of them holds anything.
NODELESS_TYPES = frozenset(
    {int, float, complex, bool, str, bytes, type(None), types.FunctionType, type(Ellipsis)}
) | {*OBJECT_STATES, DATA_ATTRIBUTES}
_NOTHING, _OBJECT, _VARIABLE, _OTHER = object(), object(), object(), object()


class Nodes(NamedTuple):
    """The nodes of a module, itself included, in no particular order.

    Attributes:
      objects: the modules and other NNX objects.
      variables: the Variables.
      others: containers, and what else Flax or JAX knows as a node.
    """

    objects: list[nnx.Pytree]
    variables: list[nnx.Variable[Any]]
    others: list[Any]


def _nodes_by_type(root: Any) -> Nodes:
    """The nodes of a module.

    `nnx.iter_graph` yields static attributes as well, and takes every node apart and sorts it,
    which is a good part of what an initialisation costs.

    Args:
      root: a module, or a container of modules.
    """
    found = Nodes([], [], [])
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        kind = _kind(type(node))
        if kind is _NOTHING or id(node) in seen:
            continue
        # What is found is kept alive, so that its id stays its own.
        if kind is _OBJECT:
            found.objects.append(node)
            pending.extend(vars(node).values())
        elif kind is _VARIABLE:
            found.variables.append(node)
        else:
            impl: Any = get_node_impl(node)
            if impl is not None:
                found.others.append(node)
                pending.extend(impl.node_dict(node).values())
            elif isinstance(node, nnx.Variable):
                # A hijax one, whose type is another.
                found.variables.append(node)
            else:
                continue
        seen.add(id(node))
    return found


def _nodes_by_iteration(root: Any) -> Nodes:
    """The same by `nnx.iter_graph`."""
    found = Nodes([], [], [])
    if _kind(type(root)) is _NOTHING or not _is_node(root):
        return found
    for _, node in nnx.iter_graph(root, graph=True):
        if isinstance(node, nnx.Pytree):
            found.objects.append(node)
        elif isinstance(node, nnx.Variable):
            found.variables.append(node)
        elif type(node) not in NODELESS_TYPES and _is_node(node):
            found.others.append(node)
    return found


def _is_node(value: Any) -> bool:
    """Whether Flax or JAX takes a value apart."""
    if isinstance(value, nnx.Pytree | nnx.Variable):
        return True
    return not jax.tree_util.all_leaves([value])


def _items_by_impl(node: Any) -> Mapping[Any, Any]:
    """What a container holds; nothing, if it is none."""
    impl: Any = get_node_impl(node)
    return {} if impl is None else impl.node_dict(node)


def _items_by_leaves(node: Any) -> Mapping[Any, Any]:
    """The same by JAX, which knows every container."""
    if isinstance(node, nnx.Pytree):
        return vars(node)
    paths, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {jax.tree_util.keystr(path): value for path, value in paths if path}


_IS_FAST = holds(
    "flax.nnx.graphlib.get_node_impl", lambda: get_node_impl([]) is not None, "nnx.iter_graph"
)
nodes_below = _nodes_by_type if _IS_FAST else _nodes_by_iteration
items_of = _items_by_impl if _IS_FAST else _items_by_leaves


@functools.lru_cache(maxsize=4096)
def _kind(node_type: type) -> object:
    """What a type's class hierarchy says of its objects; whether it is registered may change."""
    if node_type in NODELESS_TYPES or issubclass(node_type, type):
        return _NOTHING
    if issubclass(node_type, nnx.Variable):
        return _VARIABLE
    return _OBJECT if issubclass(node_type, nnx.Pytree) else _OTHER
