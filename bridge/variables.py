"""The import path of `flax.nnx.bridge.variables`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._conversion.convert import (
    linen_to_nnx,
    nnx_to_linen,
    state_to_linen,
    to_linen_var,
    to_nnx_var,
)
from ._conversion.neutral import as_dicts, walk
from ._conversion.nnx_meta import NNXMeta, with_partitioning

__all__ = [
    "NNXMeta",
    "linen_vars_to_nnx_attrs",
    "nnx_attrs_to_linen_vars",
    "to_linen_var",
    "to_nnx_var",
    "with_partitioning",
]


def linen_vars_to_nnx_attrs(variables: Mapping[str, Any]) -> dict[str, Any]:
    """`bridge.linen_to_nnx` as nested dicts.

    Args:
      variables: Linen variables.

    Returns:
      Nested dicts of Variables at the Linen paths.

    Raises:
      ConversionError: not variables.
    """
    return as_dicts(linen_to_nnx(variables))


def nnx_attrs_to_linen_vars(nnx_attrs: Mapping[str, Any]) -> Any:
    """`bridge.nnx_to_linen` of nested dicts.

    Args:
      nnx_attrs: nested dicts of Variables.

    Returns:
      Linen variables.

    Raises:
      ConversionError: not a mapping.
    """
    if not isinstance(nnx_attrs, Mapping):
        return nnx_to_linen(nnx_attrs)
    # Attributes may all be bare arrays.
    return state_to_linen(walk(nnx_attrs))
