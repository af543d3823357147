"""Models and weights for tests, without initialisers, of which each shape would be compiled."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, traverse_util

from bridge.rewrite.prove._weights import random_variables

KEYS = {"params": jax.random.key(1), "gumbel": jax.random.key(2)}


def random_weights(linen: nn.Module, *inputs: Any) -> dict[str, Any]:
    """Random variables of a Linen model, in the order in which it makes them.

    Vectors of one name and size are equal, because layers may make them in another order.
    """
    order: list[tuple[str, ...]] = []

    def init() -> Any:
        variables = linen.init(KEYS, *inputs)
        order.extend(traverse_util.flatten_dict(variables))
        # This sorts the names.
        return nn.unbox(variables)

    def value(path: tuple[str, ...]) -> Any:
        leaf = found[path]
        if getattr(leaf, "ndim", 2) > 1:
            return leaf
        return random_variables({path[-1]: leaf})[path[-1]]

    found: Any = traverse_util.flatten_dict(random_variables(jax.eval_shape(init)))
    return traverse_util.unflatten_dict({path: value(path) for path in order})


def with_weights(make: Callable[[], Any], variables: Any) -> Any:
    """A new model with the weights of a Linen model, whose layers are made in the same order."""
    paths: list[tuple[Any, ...]] = []

    def made() -> Any:
        model = make()
        paths[:] = _paths(model, ())
        return model

    model = without_weights(made)
    arrays = {name: tree for name, tree in variables.items() if jax.tree.leaves(tree)}
    left: dict[Any, Any] = traverse_util.flatten_dict(arrays)
    for path in paths:
        variable: nnx.Variable[Any] = functools.reduce(_child, path, model)
        name = str(path[-1])
        found = next(
            p for p, v in left.items() if name in (p[-1], f"{p[-1]}_") and v.shape == variable.shape
        )
        variable.set_value(left.pop(found))
    assert not left
    return model


def without_weights(make: Callable[[], Any]) -> Any:
    """A new model whose parameters have shapes and no values, and whose streams have equal keys."""
    graphdefs = []

    def split() -> Any:
        graphdef, *states = nnx.split(make(), nnx.Param, nnx.RngState, ...)
        graphdefs.append(graphdef)
        return states

    def value(leaf: Any) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))

    with nnx.use_eager_sharding(False):
        params, streams, others = jax.eval_shape(split)
        if jax.tree.leaves(others):
            others = jax.jit(lambda: split()[2])()
    return nnx.merge(graphdefs[0], params, jax.tree.map(value, streams), others)


def _child(node: Any, name: Any) -> Any:
    return node[name] if isinstance(node, nnx.List) else getattr(node, name)


def _paths(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The paths of a model's Variables, in the order in which it makes them."""
    items = enumerate(node) if isinstance(node, nnx.List) else vars(node).items()
    for name, child in items:
        if isinstance(child, nnx.Variable):
            yield (*path, name)
        elif isinstance(child, nnx.Module) and not isinstance(child, nnx.Rngs):
            yield from _paths(child, (*path, name))
