"""Looks into containers of submodules as Linen does, which names what is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax import nnx, serialization
from flax.core import FrozenDict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Container(NamedTuple):
    """A container, taken apart; `made_of` makes a frozen container of other items."""

    keys: Sequence[Any]
    items: Sequence[Any]
    made_of: Callable[[Sequence[Any]], Any]


def opened(value: object) -> Container | None:
    """A list, a tuple, a mapping or a `flax.struct` dataclass, None for all else.

    Source: flax/linen/module.py:_map_over_modules_in_tree @ 0.12.12
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Any = value
        return Container(fields._fields, value, fields._make)
    if isinstance(value, list | tuple):
        return Container(range(len(value)), value, tuple)
    if isinstance(value, Mapping) and not isinstance(value, nnx.State):
        keys = [*value]
        return Container(
            keys, [*value.values()], lambda new: FrozenDict(zip(keys, new, strict=True))
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        state = serialization.to_state_dict(value)
        # Another dataclass is its own state.
        if isinstance(state, dict):
            names = [*state]
            items = [getattr(value, name) for name in names]
            return Container(names, items, lambda new: _with(value, names, new))
    return None


def _with(value: DataclassInstance, names: Sequence[str], items: Sequence[Any]) -> Any:
    """A dataclass with other items, itself if they are the same."""
    new = dict(zip(names, items, strict=True))
    is_same = all(getattr(value, name) is item for name, item in new.items())
    return value if is_same else dataclasses.replace(value, **new)


def items_within(value: object, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """(suffix of the name that Linen gives it, item) of everything in nested containers."""
    container = opened(value)
    if container is None:
        yield suffix, value
        return
    for key, item in zip(container.keys, container.items, strict=True):
        yield from items_within(item, f"{suffix}_{key}")


def mapped(value: object, change: Callable[[str, Any], Any], suffix: str = "") -> Any:
    """Frozen containers with other items; `change` gets what `items_within` yields."""
    container = opened(value)
    if container is None:
        return change(suffix, value)
    pairs = zip(container.keys, container.items, strict=True)
    return container.made_of([mapped(item, change, f"{suffix}_{key}") for key, item in pairs])
