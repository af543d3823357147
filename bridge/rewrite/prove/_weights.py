"""Random values for a model that was never initialised."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta


def random_variables(shapes: Any, seed: int = 0) -> Any:
    """Variables of given shapes: initial values would hide faults behind zeros.

    Kernels are scaled by their fan-in, so that deep models neither explode nor vanish.
    """
    generator = np.random.default_rng(seed)

    def value(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, meta.AxisMetadata):
            return leaf.replace_boxed(value(path, leaf.unbox()))
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return _array(np.zeros(shape), dtype)
        name = str(getattr(path[-1], "key", ""))
        drawn = generator.normal(size=shape)
        if name in ("var", "scale"):
            drawn = 1 + 0.2 * np.abs(drawn)
        elif len(shape) > 1:
            drawn = drawn / math.sqrt(max(math.prod(shape[:-1]), 1))
        else:
            drawn = 0.2 * drawn
        return _array(drawn, dtype)

    return jax.tree_util.tree_map_with_path(
        value, shapes, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
    )


def _array(values: Any, dtype: Any) -> jax.Array:
    """An array; `jnp.asarray` would compile a program for each shape that it converts."""
    return jax.device_put(np.asarray(values, dtype))


# What integers may be: 0 or 1, which any table of embeddings has; 1, as a model may divide by a
# length; 0, which is the only position of a single step.
INTEGERS = ((0, 1), (1, 1), (0, 0))


def random_inputs(inputs: Any, integers: tuple[int, int] = (0, 1), seed: int = 0) -> Any:
    """Arrays for shapes.

    `integers` has the least and the largest integer.
    """
    generator = np.random.default_rng(seed + 1)
    least, largest = integers

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _array(generator.normal(size=leaf.shape), leaf.dtype)
        return _array(generator.integers(least, largest + 1, size=leaf.shape), leaf.dtype)

    return jax.tree.map(value, inputs, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))


def has_integers(tree: Any) -> bool:
    """Whether a tree has shapes of integers."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)


def inexact(tree: Any) -> list[Any]:
    """The arrays of a tree that are not integers."""
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
