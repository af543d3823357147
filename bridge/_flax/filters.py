"""Filters of Linen collections: checked, and made to take more collections than before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, cast

from flax.core import DenyList

from bridge._errors import InvalidFilterError
from bridge._types import CollectionFilter


def checked(mutable: CollectionFilter | None, where: str) -> Any:
    """A filter of collections that cannot change any more; None only where it may be left out.

    Raises InvalidFilterError if `mutable` has another form; `where` says in it who was given it.
    """
    if mutable is None or isinstance(mutable, bool | str):
        return mutable
    denied: Any = mutable.deny if isinstance(mutable, DenyList) else mutable
    is_named = isinstance(denied, Collection) and all(map(_is_name, cast("Any", denied)))
    if not is_named and not (isinstance(mutable, DenyList) and isinstance(denied, bool | DenyList)):
        raise InvalidFilterError(mutable, where)
    return mutable if isinstance(mutable, DenyList) else tuple(mutable)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def union(mutable: CollectionFilter, names: Collection[str]) -> Any:
    """The filter that takes these collections too.

    Flax's own function for this has no public name.
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
