"""Conversion of a variables tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge

from .forms import calling
from .row import Subject


def variables_tree(leaves: int) -> dict[str, Any]:
    """Linen variables with this many leaves, all of them one small array."""
    array = jnp.ones((2,))
    layers = {f"layer_{i}": {"kernel": array, "bias": array} for i in range(leaves // 2)}
    return {"params": layers}


def _rebuilding(tree: Any) -> Callable[[], Any]:
    def call() -> Any:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        return jax.tree_util.tree_unflatten(treedef, leaves)

    return call


def _flax_attributes(variables: Any) -> Any:
    return flax_bridge.variables.linen_vars_to_nnx_attrs(variables)


CONVERSIONS: Mapping[str, Subject] = {
    "tree of arrays": _rebuilding,
    "State": lambda tree: _rebuilding(bridge.linen_to_nnx(tree)),
    "linen_to_nnx": lambda tree: calling(bridge.linen_to_nnx, tree),
    "nnx_to_linen": lambda tree: calling(bridge.nnx_to_linen, bridge.linen_to_nnx(tree)),
    "flax to NNX": lambda tree: calling(_flax_attributes, tree),
    "flax to Linen": lambda tree: calling(
        flax_bridge.variables.nnx_attrs_to_linen_vars, _flax_attributes(tree)
    ),
}


def variables_alone(tree: Any) -> Callable[[], Any]:
    """Nothing but the Variables, by Flax."""
    leaves = jax.tree.leaves(tree)
    metadata = nnx.Param(leaves[0]).get_metadata()
    return lambda: [nnx.Param.from_metadata(leaf, metadata) for leaf in leaves]


class _Nothing(nn.Module):
    def __call__(self, x):
        return x


def from_variables(tree: Any) -> Callable[[], Any]:
    """`ToNNX.from_variables`."""
    return lambda: bridge.ToNNX.from_variables(_Nothing(), tree)


def linen_variables(tree: Any) -> Callable[[], Any]:
    """`ToNNX.linen_variables`."""
    return bridge.ToNNX.from_variables(_Nothing(), tree).linen_variables
