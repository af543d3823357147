"""The partition spec of a value, in a form that compares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from flax.core import meta
from flax.linen import spmd

import registry
from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Address, Leaf


class Spec(tuple[Any, ...]):
    """A partition spec in its shortest form, equal if it says the same.

    Attributes:
      ndim: of the value.
      is_given: whether there is an annotation.
      readings: the spec as it is, and with the rules that the annotation holds.
    """

    ndim: int | None
    is_given: bool
    readings: frozenset[tuple[Any, ...]]

    def __str__(self) -> str:
        return str(jax.sharding.PartitionSpec(*self)) if self.is_given else "none"


def spec_of(address: Address, leaf: Leaf, active: registry.Registry) -> Spec:
    """What a leaf's metadata says, logical names as they are."""
    box = linen_leaves.from_leaf(address[0], leaf, active) if leaf.box is not None else None
    names: Any = ()
    if isinstance(box, meta.AxisMetadata) and hasattr(box, "get_partition_spec"):
        names = box.get_partition_spec()  # type: ignore[attr-defined]
    rules = leaf.fields.get("sharding_rules") or leaf.fields.get("rules")
    spec = Spec(_shortest(names))
    spec.ndim = getattr(leaf.value, "ndim", None)
    spec.is_given = bool(spec)
    readings = [tuple(spec)]
    if rules and names:
        mapped: Any = spmd.logical_to_mesh_axes(tuple(names), rules)
        readings.append(_shortest(mapped or ()))
    spec.readings = frozenset(readings)
    return spec


def _shortest(names: Iterable[Any]) -> tuple[Any, ...]:
    spec = [n[0] if isinstance(n, tuple | list) and len(n) == 1 else n for n in names]
    spec = [tuple(n) if isinstance(n, list) else n for n in spec]
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)
