"""One value that refers to nodes, kept without them and made again with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from .self_references import FREE, NodeSearch, Tie, Writer, referents, untied


def nodes_in(value: Any) -> list[Any]:
    """The modules and Variables that a value refers to, directly or through others.

    What is below one of them is not looked for.
    """
    if type(value) in FREE:
        return []
    # By id, and held, so that an id is nobody else's.
    met = {id(value): value}
    left = [value]
    found: list[Any] = []
    while left:
        value = left.pop()
        if isinstance(value, nnx.Pytree | nnx.Variable):
            found.append(value)
            continue
        for item in referents(value):
            if type(item) not in FREE and id(item) not in met:
                met[id(item)] = item
                left.append(item)
    return found


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
