"""The variables below a path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax.core import meta

from ._records import Path


def below(variables: Mapping[str, Any], path: Path, axes: int = 0) -> dict[str, Any]:
    """Each collection's part at a path, without so many axes that transforms put first."""
    found: dict[str, Any] = {}
    for collection, tree in variables.items():
        inner = tree
        for name in path:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            found[collection] = _inner(inner, axes) if axes else inner
    return found


def _inner(tree: Any, axes: int) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), meta.unbox(tree)
    )
