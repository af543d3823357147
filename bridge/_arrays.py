"""The arrays in a call's inputs, apart from what is static in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
from jax.core import Tracer


def is_jax_array(value: Any) -> TypeGuard[jax.Array]:
    """`isinstance(value, jax.Array)`, of whose answers those for concrete arrays are remembered.

    JAX answers in Python, and that for every leaf is a good part of an eager call.
    """
    return _is_concrete(type(value)) or isinstance(value, jax.Array)


def are_jax_arrays(values: Sequence[Any]) -> bool:
    """Whether all values are `jax.Array`s; concrete ones are asked for their types alone."""
    return all(map(_is_concrete, set(map(type, values)))) or all(map(is_jax_array, values))


def is_concrete_array(value: Any) -> bool:
    """Whether a value is an array and no tracer."""
    return _is_concrete(type(value))


@functools.lru_cache(maxsize=256)
def _is_concrete(kind: type) -> bool:
    # What a tracer stands for its type does not tell.
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


class Arrays:
    """Any pytree as a list of its arrays, and the way back.

    What has a shape and a dtype is an array, concrete, traced or abstract; the rest, such as a
    `train=True`, is static.

    Args:
      tree: a pytree, such as the `(args, kwargs)` of a call.
    """

    def __init__(self, tree: Any):
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self._indices = [i for i, leaf in enumerate(self._leaves) if is_array(leaf)]

    @property
    def values(self) -> list[Any]:
        """The arrays in order."""
        return [self._leaves[i] for i in self._indices]

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays as shapes and dtypes, without a sharding."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.values]

    def tree(self, values: list[Any]) -> Any:
        """The tree with other arrays in it; the inverse of `values`."""
        known = dict(zip(self._indices, values, strict=True))
        leaves = [known.get(i, leaf) for i, leaf in enumerate(self._leaves)]
        return jax.tree.unflatten(self._treedef, leaves)


def is_array(value: Any) -> bool:
    """Whether a leaf is an array, concrete, traced or abstract."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
