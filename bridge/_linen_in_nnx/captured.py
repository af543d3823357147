"""How `nnx.capture` collects what a wrapped Linen module sows and perturbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

import registry
from bridge._conversion.neutral import as_dicts
from bridge._flax.objects import CAPTURES


@dataclasses.dataclass(frozen=True)
class Captures:
    """The Variables that `nnx.capture` put on a wrapper for the time of a call.

    Each holds a dict of what was collected so far; a Linen collection of it is that dict, nested.

    Attributes:
      by_collection: the Variable by the collection of its type.
    """

    by_collection: Mapping[str, nnx.Variable[Any]]

    @property
    def collections(self) -> tuple[str, ...]:
        return tuple(self.by_collection)

    def variables(self) -> dict[str, Any]:
        """What was collected so far, as Linen collections; Linen appends to it."""
        return {c: as_dicts(v.get_value()) for c, v in self.by_collection.items()}

    def take(self, updates: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keeps the captured collections of a call's updates, and returns the others."""
        for collection, variable in self.by_collection.items():
            variable.set_value(as_dicts(updates.get(collection, {})))
        return {c: tree for c, tree in updates.items() if c not in self.by_collection}


def active(wrapper: nnx.Module) -> Captures:
    """The captures on a wrapper, none outside of `nnx.capture`."""
    variables = vars(wrapper).get(CAPTURES, ())
    in_force = registry.current()
    return Captures({in_force.name_from_type(v.var_type): v for v in variables})
