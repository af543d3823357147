"""One value that refers to nodes, kept without them and made again with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from .self_references import FREE, NodeSearch, Tie, Writer, referents, untied

_NODES = (nnx.Pytree, nnx.Variable)


def nodes_in(value: Any) -> list[Any]:
    """The modules and Variables that a value refers to, directly or through others."""
    return list(_ends_in(value, _NODES))


def arrays_within(value: Any) -> list[jax.Array]:
    """The arrays that a value refers to, but for those of modules and Variables."""
    return [x for x in _ends_in(value, (*_NODES, jax.Array)) if not isinstance(x, _NODES)]


def _ends_in(value: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """The objects of these types that a value refers to; what is below one is not looked for."""
    if type(value) in FREE:
        return
    # By id, and held, so that an id is nobody else's.
    met = {id(value): value}
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, kinds):
            yield value
            continue
        for item in referents(value):
            if type(item) not in FREE and id(item) not in met:
                met[id(item)] = item
                left.append(item)


def tied(value: Any, nodes: Sequence[Any]) -> Tie:
    """A value without these nodes.

    Raises:
      Exception: it holds one in a way that nobody can follow; anything that `pickle` raises.
    """
    search = NodeSearch({id(node): index for index, node in enumerate(nodes)})
    return Tie(*Writer(search).write([value]), 0)


def value_of(tie: Tie, nodes: Sequence[Any]) -> Any:
    """The value with other nodes, in the same order; the inverse of `tied`."""
    return untied([tie], dict(enumerate(nodes)))[0]
