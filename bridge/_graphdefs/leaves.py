"""Finds the leaves of a GraphDef in Linen variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from flax import nnx

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.neutral import Address, Path, unplace
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._flax.graphdefs import VariableDef, leaves_of


class GraphDefLeaf(NamedTuple):
    """Where one leaf of a GraphDef comes from.

    Attributes:
      path: the path in the NNX module.
      address: the (collection, path) in Linen variables.
      var_type: the Variable type, None for a bare array.
      metadata: the Variable's metadata.
      is_rng: whether this is the key or the count of an RNG stream.
      has_fixed_shape: whether its value keeps its shape, as those of a cache need not.
    """

    path: Path
    address: Address
    var_type: type[nnx.Variable[Any]] | None
    metadata: Any
    is_rng: bool
    has_fixed_shape: bool


class GraphDefLeaves(tuple[GraphDefLeaf, ...]):
    """The leaves of a GraphDef in graph mode under one registry, in the order of its leaves.

    `places` has their addresses in Linen variables, in order, and `addresses` the same as a set.
    `rng` has the indices of those that are RNG state.
    """

    registry: registry.Registry
    places: tuple[Address, ...]
    addresses: frozenset[Address]
    rng: list[int]

    def __new__(cls, graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Self:
        self = super().__new__(cls, _leaves(graphdef, active))
        self.registry = active
        self.places = tuple(slot.address for slot in self)
        self.addresses = frozenset(self.places)
        self.rng = [i for i, slot in enumerate(self) if slot.is_rng]
        return self


def _leaves(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[GraphDefLeaf]:
    for path, item in leaves_of(graphdef):
        if not isinstance(item, VariableDef):
            yield GraphDefLeaf(path, (ARRAYS, path), None, None, False, False)
            continue
        found: Any = item
        yield GraphDefLeaf(
            path,
            (active.name_from_type(found.type), unplace(path, found.metadata.get(DISPLACED_KEY))),
            found.type,
            found.metadata,
            issubclass(found.type, nnx.RngState),
            issubclass(found.type, nnx.Param | nnx.BatchStat),
        )
