"""The variables below a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.core import meta

from ._records import Lifted, Making, Path, Records


def below(
    variables: Mapping[str, Any], path: Path, stacks: Sequence[Lifted] = ()
) -> dict[str, Any]:
    """Each collection's part at a path, without the axes that transforms added.

    Args:
        variables: shapes, by collection.
        path: of the module.
        stacks: the transforms around it, the outermost first.
    """
    found: dict[str, Any] = {}
    for collection, tree in variables.items():
        inner = tree
        for name in path:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            axes = [each.axes[collection] for each in stacks if collection in each.axes]
            found[collection] = _inner(inner, axes) if axes else inner
    return found


def below_made(records: Records, making: Making) -> dict[str, Any]:
    """The abstract variables below the module that was made, by collection."""
    path = making.path or ()
    return below(records.variables[making.run], path, records.stacks_above(making.run, path))


def _inner(tree: Any, axes: Sequence[int]) -> Any:
    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        for axis in axes:
            del shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.map(one, meta.unbox(tree))
