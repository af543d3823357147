"""Linen variables <-> NNX State, in both directions, without any module in sight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

import registry
from bridge._errors import mapping_error
from bridge._types import VARIABLE, State, Variable, state_of

from . import linen_leaves, nnx_leaves
from .neutral import Path, is_mapping, nest, walk
from .nnx_meta import NNXMeta


def linen_to_nnx(variables: Mapping[str, Any]) -> State:
    """Converts Linen variables to an NNX State.

    A leaf of collection `c` at path `p` becomes a Variable of `c`'s type at `p`. If two collections
    have a leaf at one path, or a leaf of one lies above a subtree of the other, `params` keeps the
    path and the other leaf goes below its collection's name. The inverse is exact in every case.

    Args:
      variables: `{collection: {name: array, abstract array, pytree, box or mapping}}`, a dict or a
        FrozenDict. A collection `nnx` is static and is left out.

    Returns:
      A State with a Variable for every leaf. An empty mapping becomes a Variable with the value
      `{}`.

    Raises:
      ConversionError: `variables` are not Linen variables.
      UnsupportedBoxError: a metadata box cannot be carried.

    Example::

      >>> import jax.numpy as jnp
      >>> import bridge
      >>> state = bridge.linen_to_nnx({'params': {'Dense_0': {'kernel': jnp.ones((2, 3))}}})
      >>> type(state['Dense_0']['kernel']).__name__, state['Dense_0']['kernel'].shape
      ('Param', (2, 3))
    """
    linen_leaves.check_variables(variables)
    return nnx.State(nest(nnx_leaves.to_leaves(linen_leaves.from_variables(variables))))


def nnx_to_linen(state_or_module: State | nnx.Pytree | Mapping[Any, Any]) -> Any:
    """Converts a State or an NNX module to Linen variables; the inverse of `linen_to_nnx`.

    Args:
      state_or_module: a State, nested dicts of Variables, or a module (all of its state, RNG state
        included).

    Returns:
      Variables by collection: a dict, or a FrozenDict if Flax's `flax_return_frozendict` is on. A
      Variable with metadata is returned in an `NNXMeta`, or in the Linen box that it came from.
      Arrays outside of Variables are in the collection `nnx_arrays`.

    Raises:
      ConversionError: the argument is neither a State nor a module, or is Linen variables already.
      RegistrationConflictError: two unregistered Variable types have the same name.

    Example::

      >>> from flax import nnx
      >>> import bridge
      >>> variables = bridge.nnx_to_linen(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> variables['params']['kernel'].shape
      (2, 3)
    """
    expected = "an nnx.State or an NNX module"
    if isinstance(state_or_module, nnx.Pytree):
        state_or_module = state_of(state_or_module, graph=True)
    if not is_mapping(type(state_or_module)):
        raise mapping_error(state_or_module, expected)
    is_state = isinstance(state_or_module, nnx.State)
    # The items of a State itself are made one by one.
    items = walk(state_or_module.raw_mapping if is_state else state_or_module)
    if items and not is_state and not any(isinstance(item, VARIABLE) for _, item in items):
        remedy = "if these are Linen variables, bridge.linen_to_nnx makes a State of them"
        raise mapping_error(state_or_module, expected, remedy)
    return state_to_linen(items)


def state_to_linen(items: Iterable[tuple[Path, Any]]) -> Any:
    """The Linen variables that hold the (path, Variable or bare array) of a State."""
    return linen_leaves.to_variables(nnx_leaves.from_leaves(items))


def to_linen_var(variable: Variable) -> Any:
    """A Variable as a leaf of Linen variables: its value, or a metadata box around it.

    Args:
      variable: any Variable.

    Returns:
      The value, if there is no metadata to keep. The Linen box that it came from, rebuilt from that
      box's own fields. Otherwise an `NNXMeta` with all of the metadata, including `ref`, `hijax`
      and `eager_sharding`, so that `to_nnx_var` makes the same Variable again.
    """
    leaf = nnx_leaves.to_leaf(variable, registry.current())
    if leaf.box is None and isinstance(leaf.value, jax.Array):
        return leaf.value
    if leaf.box is NNXMeta:
        return linen_leaves.box_of(variable.var_type, leaf)
    return linen_leaves.from_leaf("", leaf, registry.current())


def to_nnx_var(collection: str, value: object) -> Variable:
    """A leaf of Linen variables as a Variable; the inverse of `to_linen_var`.

    Args:
      collection: the leaf's collection, which tells the Variable type.
      value: an array, any pytree, or a metadata box.
    """
    active = registry.current()
    leaf = linen_leaves.to_leaf(collection, (), value, active)
    return nnx_leaves.from_leaf(active.type_from_name(collection), leaf)
