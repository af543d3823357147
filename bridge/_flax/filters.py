"""Filters of Linen collections that take more collections than before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from flax.core import DenyList

from bridge._types import CollectionFilter


def union(mutable: CollectionFilter, names: Collection[str]) -> Any:
    """The filter that takes these collections too.

    Flax has such a function too, without a public name.

    Args:
      mutable: a collection's name, several, True, False, or a `DenyList` of such a filter.
      names: collections.
    """
    if mutable is True:
        return True
    if isinstance(mutable, DenyList):
        return DenyList(_without(mutable.deny, names))
    return _names(mutable) | {*names}


def _without(mutable: CollectionFilter, names: Collection[str]) -> Any:
    """The filter that takes these collections no more."""
    if mutable is True:
        return DenyList((*names,))
    if isinstance(mutable, DenyList):
        return DenyList(union(mutable.deny, names))
    return _names(mutable) - {*names}


def _names(mutable: Literal[False] | str | Collection[str]) -> frozenset[str]:
    """The collections of a filter without `DenyList` and True."""
    if mutable is False:
        return frozenset()
    return frozenset((mutable,) if isinstance(mutable, str) else mutable)
