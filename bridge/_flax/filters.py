"""Filters of Linen collections, put together."""

from __future__ import annotations

from typing import Any

from flax.core import DenyList


def union(a: Any, b: Any) -> Any:
    """The filter of the collections that either of two filters takes.

    Flax has such a function too, without a public name.

    Args:
      a: a collection's name, several, True, False, or a `DenyList` of such a filter.
      b: another one.
    """
    if a is True or b is True:
        return True
    if isinstance(a, DenyList) and isinstance(b, DenyList):
        return DenyList(_intersection(a.deny, b.deny))
    if isinstance(a, DenyList):
        return DenyList(_difference(a.deny, b))
    if isinstance(b, DenyList):
        return DenyList(_difference(b.deny, a))
    return _names(a) | _names(b)


def _intersection(a: Any, b: Any) -> Any:
    """What two filters have in common."""
    if isinstance(a, DenyList) and isinstance(b, DenyList):
        return DenyList(union(a.deny, b.deny))
    if a is True or b is True:
        return b if a is True else a
    if isinstance(a, DenyList):
        return _difference(b, a.deny)
    if isinstance(b, DenyList):
        return _difference(a, b.deny)
    return _names(a) & _names(b)


def _difference(a: Any, b: Any) -> Any:
    """What a filter takes and another one does not."""
    if b is True:
        return False
    if isinstance(b, DenyList):
        return _intersection(a, b.deny)
    if a is True:
        return DenyList(b)
    if isinstance(a, DenyList):
        return DenyList(union(a.deny, b))
    return _names(a) - _names(b)


def _names(names: Any) -> frozenset[str]:
    """The collections of a filter without `DenyList` and True."""
    if names is False:
        return frozenset()
    return frozenset((names,) if isinstance(names, str) else names)
