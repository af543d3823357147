"""The attributes of a module's objects before a call, against those after it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

from bridge._flax.objects import state_flags

_ABSENT = object()


class AttributesBefore:
    """What each object of a module holds now.

    Args:
      objects: the NNX objects.
    """

    def __init__(self, objects: Iterable[nnx.Pytree]):
        self._before = [(node, type(node), state_flags(node), dict(vars(node))) for node in objects]
        self._imposed: list[tuple[nnx.Pytree, str, Any, Any]] = []

    def note_imposed(self) -> None:
        """Notes that what has been set until now is for the call alone, as its mode is."""
        self._imposed = [
            (node, name, attributes.get(name, _ABSENT), value)
            for node, _, _, attributes in self._before
            for name, value in vars(node).items()
            if attributes.get(name, _ABSENT) is not value
        ]

    def lift_imposed(self) -> None:
        """Takes that back where it is still as it was set."""
        for node, name, before, during in self._imposed:
            if vars(node).get(name, _ABSENT) is not during:
                continue
            if before is _ABSENT:
                del vars(node)[name]
            else:
                vars(node)[name] = before

    def are_kept(self) -> bool:
        """Whether every object has the attributes that it had: the same values, by identity."""
        return all(
            type(node) is kind and state_flags(node) == flags and holds_the_same(vars(node), before)
            for node, kind, flags, before in self._before
        )


def holds_the_same(items: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two mappings hold the same objects by the same names, in the same order."""
    return list(items) == list(before) and all(map(operator.is_, items.values(), before.values()))
