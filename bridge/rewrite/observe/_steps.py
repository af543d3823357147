"""Single steps of models that decode: `init` sees whole sequences, and each call one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ._snapshots import is_array

COLLECTION = "cache"
_AXIS = 1


def choices(inputs: Any, kwargs: Mapping[str, Any]) -> Iterator[frozenset[int]]:
    """The arrays that may be sequences: all of one length, the last one alone, or none.

    Yields the numbers of the leaves that are cut into steps.
    """
    lengths = {
        number: leaf.shape[_AXIS]
        for number, leaf in enumerate(jax.tree.leaves((tuple(inputs), dict(kwargs))))
        if is_array(leaf) and len(leaf.shape) > _AXIS and leaf.shape[_AXIS] > 1
    }
    for length in dict.fromkeys(reversed(lengths.values())):
        yield frozenset(number for number, own in lengths.items() if own == length)
    for number in reversed(lengths):
        yield frozenset([number])
    yield frozenset()


def step(
    inputs: Any, kwargs: Mapping[str, Any], cut: frozenset[int], number: int = 0
) -> tuple[Any, dict[str, Any]]:
    """The arguments of one step.

    `cut` has the leaves that are sequences. `number` says which step; the last one is repeated.
    """
    leaves, tree = jax.tree.flatten((tuple(inputs), dict(kwargs)))

    def part(leaf: Any) -> Any:
        begin = min(number, leaf.shape[_AXIS] - 1)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((leaf.shape[0], 1, *leaf.shape[2:]), leaf.dtype)
        return leaf[:, begin : begin + 1]

    return jax.tree.unflatten(tree, [part(x) if i in cut else x for i, x in enumerate(leaves)])
