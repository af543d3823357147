"""Chooses other values for a field, which a rewritten class has to take as the Linen class does."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Collection, Iterator
from typing import Any

from flax import linen as nn

# For a field that is None, by what its annotation names.
_FOR_NONE = (("bool", True), ("int", 6), ("float", 0.5))


def other_values(value: Any, annotation: Any = None) -> list[list[Any]]:
    """Values of the same kind, each different; those of a configuration by its fields.

    Args:
        value: the field's value.
        annotation: its type, where it is known: it says what may stand in the place of None.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type | nn.Module):
        return [list(_others(value, annotation))]
    types = types_of(type(value))
    return [
        [dataclasses.replace(value, **{field.name: other}) for other in others]
        for field in dataclasses.fields(value)
        if field.init
        for others in other_values(getattr(value, field.name), types.get(field.name))
    ]


def _others(value: Any, annotation: Any) -> Iterator[Any]:
    allowed = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        yield from (each for each in allowed if each != value)
    elif value is None:
        names = [getattr(each, "__name__", str(each)) for each in allowed]
        yield from (other for name, other in _FOR_NONE if name in names)
    elif isinstance(value, enum.Enum):
        yield from (each for each in type(value) if each is not value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value * 2
        if value > 1:
            yield value - 1
    elif isinstance(value, float):
        yield value / 2 if value else 0.25
    elif type(value) in (list, tuple) and all(type(each) is int for each in value):
        yield from map(type(value), _other_sequences(value))
    if value is not None and type(None) in allowed:
        yield None


def other_sizes(module: nn.Module, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Integers for the fields of a module, each another one, in the order to try.

    Args:
        module: the module.
        names: the fields.
    """
    known = {name: getattr(module, name) for name in names}
    integers = [name for name, each in known.items() if type(each) is int and each > 0]
    if integers:
        yield {name: known[name] + 1 + place for place, name in enumerate(integers)}
        yield {name: known[name] * (2 + place) for place, name in enumerate(integers)}


def _other_sequences(value: Any) -> Iterator[list[int]]:
    if value:
        yield []
        if len(value) > 1:
            yield list(value[:-1])
        # Unequal, so that one member cannot stand for another.
        yield [each + 2 * (place + 1) for place, each in enumerate(value)]
        yield [*value, 2 * value[-1]]
    else:
        yield [6, 4]


def types_of(cls: type) -> dict[str, Any]:
    """The types of a class's fields; none where an annotation cannot be resolved."""
    try:
        return typing.get_type_hints(cls)
    except Exception:
        return {}
