"""Every node below a module: modules, Variables and the containers between them, each once."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from flax import nnx

# Most attributes are of these types, and none of them holds anything.
_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), types.FunctionType, type, type(Ellipsis)}
)
_OBJECT, _VARIABLE, _OTHER = object(), object(), object()


def nodes_below(root: Any) -> list[Any]:
    """The nodes of a module, itself included, in no particular order.

    `nnx.iter_graph` yields static attributes as well, and takes every node apart and sorts it,
    which is a good part of what an initialisation costs.

    Args:
      root: a module, or a container of modules.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if type(node) in _ATOMS or id(node) in seen:
            continue
        kind = _kind(type(node))
        children: Iterable[Any] = ()
        if kind is _OBJECT:
            children = vars(node).values()
        elif kind is _OTHER:
            impl: Any = nnx.graphlib.get_node_impl(node)
            if impl is not None:
                children = impl.node_dict(node).values()
            elif not isinstance(node, nnx.Variable):
                # A hijax Variable says that it is one, but its type is another.
                continue
        seen.add(id(node))
        # Keeps it alive, so that its id stays its own.
        found.append(node)
        pending.extend(children)
    return found


@functools.lru_cache(maxsize=4096)
def _kind(node_type: type) -> object:
    """What a type's class hierarchy says of its objects; whether it is registered may change."""
    if issubclass(node_type, nnx.Variable):
        return _VARIABLE
    return _OBJECT if issubclass(node_type, nnx.Pytree) else _OTHER
