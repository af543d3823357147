"""Every node below a module: modules, Variables and the containers between them, each once."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from flax import nnx

from .objects import DATA_ATTRIBUTES, ObjectState

# Most attributes are of these types, which hold no other objects.
NODELESS_TYPES = frozenset(
    {int, float, complex, bool, str, bytes, type(None), types.FunctionType, type(Ellipsis)}
) | {ObjectState, DATA_ATTRIBUTES}
_NOTHING, _OBJECT, _VARIABLE, _OTHER = object(), object(), object(), object()


class Nodes(NamedTuple):
    """The nodes of a module, itself included, in no particular order.

    `objects` are modules and other NNX objects; `others` are containers, and what else Flax or JAX
    knows as a node.
    """

    objects: list[nnx.Pytree]
    variables: list[nnx.Variable[Any]]
    others: list[Any]


def nodes_below(root: object) -> Nodes:
    """The nodes of a module, or of a container of modules.

    `nnx.iter_graph` yields static attributes as well, and takes every node apart and sorts it,
    which is a good part of what an initialisation costs.
    """
    found = Nodes([], [], [])
    seen: set[int] = set()
    pending: list[Any] = [root]
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
        elif (items := items_of(node)) is not None:
            found.others.append(node)
            pending.extend(items)
        elif isinstance(node, nnx.Variable):
            # A hijax Variable, which has another type.
            found.variables.append(node)
        else:
            continue
        seen.add(id(node))
    return found


def items_of(container: object) -> Iterable[Any] | None:
    """What a container holds; None for anything else."""
    # JAX would sort the keys.
    if isinstance(container, dict):
        return container.values()
    found = jax.tree_util.default_registry.flatten_one_level(container)
    return None if found is None else found[0]


def nodes_among(values: Iterable[object]) -> list[Any]:
    """Those values that are NNX objects or Variables."""
    return [x for x in values if _kind(type(x)) in (_OBJECT, _VARIABLE)]


@functools.lru_cache(maxsize=4096)
def _kind(node_type: type) -> object:
    """What a type's class hierarchy says of its objects; whether it is registered may change."""
    if node_type in NODELESS_TYPES or issubclass(node_type, type):
        return _NOTHING
    if issubclass(node_type, nnx.Variable):
        return _VARIABLE
    return _OBJECT if issubclass(node_type, nnx.Pytree) else _OTHER
