"""The arguments of a layer of NNX as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ._layers import Layer


def ordered(layer: Layer, given: Mapping[str, str], positional: Iterable[str]) -> str:
    """The arguments as text, by position as far as they were and NNX takes them so."""
    by_position, rest = set(positional), dict(given)
    parts = []
    for name in layer.positional:
        if name not in rest or name not in by_position:
            break
        parts.append(rest.pop(name))
    first = [name for name in layer.positional if name in rest]
    others = [name for name in rest if name not in first and name != "rngs"]
    tail = ["rngs"] if "rngs" in rest else []
    return ", ".join([*parts, *(f"{name}={rest[name]}" for name in (*first, *others, *tail))])


def has_next(layer: Layer, name: str, positional: Iterable[str]) -> bool:
    """Whether the argument behind one is given by position."""
    place = layer.positional.index(name) + 1 if name in layer.positional else 0
    return bool(place) and bool({*layer.positional[place : place + 1]} & {*positional})
