"""The arrays in a call's inputs, apart from what is static in them."""

from __future__ import annotations

from typing import Any

import jax

from bridge._types import flatten_tree, is_shaped, unflatten_tree


class Arrays:
    """Any pytree, such as the arguments of a call, as a list of its arrays, and the way back.

    A leaf with a shape and a dtype is an array: concrete, traced or abstract. Everything else, such
    as `train=True`, is static.
    """

    def __init__(self, tree: object):
        self._leaves, self._treedef = flatten_tree(tree)
        self._indices = [i for i, leaf in enumerate(self._leaves) if is_shaped(leaf)]

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
        return unflatten_tree(self._treedef, leaves)


def shape_of(value: object) -> tuple[int, ...] | None:
    """The shape of a leaf's value, None if it is not one array."""
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def is_abstract(value: object) -> bool:
    """Whether a leaf's value, or an array in it, is a shape alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def taken(value: object) -> Any:
    """A value that stays as it is now: with containers of its own."""
    return value if isinstance(value, jax.Array) else jax.tree.map(_itself, value)


def is_taken(value: object, before: object) -> bool:
    """Whether a value is still what it was when it was taken; leaves are compared by identity."""
    if value is before:
        return True
    if isinstance(value, jax.Array) or isinstance(before, jax.Array):
        return False
    leaves, tree = flatten_tree(value)
    leaves_before, tree_before = flatten_tree(before)
    return tree == tree_before and all(x is y for x, y in zip(leaves, leaves_before, strict=True))


def _itself(leaf: object) -> object:
    return leaf
