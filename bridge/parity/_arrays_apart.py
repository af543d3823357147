"""The arrays of a tree apart from all else in it: JAX takes the arrays and leaves the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from ._numbers import is_comparable


class Apart(NamedTuple):
    """A tree in two parts: what JAX can trace, and the structure with all other leaves.

    `rebuild` takes arrays in the same order and returns the tree with those.
    """

    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    rest: tuple[Any, list[Any]]


def apart(tree: Any) -> Apart:
    """Takes the arrays out of a tree; modules and Variables are not looked into."""
    leaves, structure = jax.tree_util.tree_flatten(
        tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable | nn.Module)
    )
    places = [place for place, leaf in enumerate(leaves) if _is_traceable(leaf)]
    static = list(leaves)
    for place in places:
        static[place] = None

    def rebuild(arrays: Sequence[Any]) -> Any:
        whole = list(static)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        return jax.tree_util.tree_unflatten(structure, whole)

    return Apart([leaves[place] for place in places], rebuild, (structure, static))


class OnlyArrays:
    """A function that returns the arrays of what another one returns, as JAX's transforms want it.

    `rebuild` makes of such arrays what the other one returned.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.rebuild: Callable[[Sequence[Any]], Any] = list

    def __call__(self, argument: Any) -> list[Any]:
        found = apart(self._function(argument))
        self.rebuild = found.rebuild
        return found.arrays


def under_axes(call: Callable[[], Any], axes: Mapping[str, int]) -> Any:
    """What a function returns where named axes are bound.

    Every member of an axis gets the same. So `pmean` changes nothing, and `psum` multiplies by the
    size of the axis. Nothing is batched by that: an eager function stays eager.
    """
    if not axes:
        return call()
    (name, size), *inner = axes.items()
    member = OnlyArrays(lambda _: under_axes(call, dict(inner)))
    arrays = jax.vmap(member, axis_name=name)(np.arange(size))
    return member.rebuild([array[0] for array in arrays])


def _is_traceable(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return True
    return is_comparable(leaf) and leaf.dtype.kind in "biufcV"
