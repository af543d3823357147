"""Checks the forms of `mutable`: True, False, a collection, several of them, or all but some."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from flax.core import DenyList

from bridge._errors import InvalidFilterError
from bridge._types import CollectionFilter


def checked(mutable: CollectionFilter | None, where: str) -> Any:
    """A filter of collections that cannot change any more.

    Args:
      mutable: names, a bool or a `DenyList`; None where it may be left out.
      where: who was given it, for the error.

    Raises:
      InvalidFilterError: it is none of these.
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
