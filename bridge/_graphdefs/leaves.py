"""Where the leaves of a GraphDef are in Linen variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from flax import nnx

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.neutral import Address, Path, unplace
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._flax.graphdefs import NodeRef, VariableDef, leaves_of


class GraphDefLeaf(NamedTuple):
    """Where one leaf of a GraphDef comes from.

    Attributes:
      path: the path in the NNX module.
      address: the (collection, path) in Linen variables.
      var_type: the Variable type, None for a bare array.
      metadata: the Variable's metadata.
      is_reference: whether the Variable holds an array reference.
      is_special: whether it does, of its own, or is a hijax Variable.
      is_rng: whether this is the key or the count of an RNG stream.
      has_fixed_shape: whether its value keeps its shape, as those of a cache need not.
    """

    path: Path
    address: Address
    var_type: type[nnx.Variable[Any]] | None
    metadata: Any
    is_reference: bool
    is_special: bool
    is_rng: bool
    has_fixed_shape: bool


class GraphDefLeaves(tuple[GraphDefLeaf, ...]):
    """The leaves of a GraphDef under one registry, in the order of its leaves.

    Args:
      graphdef: a GraphDef in graph mode.
      active: the registry that names the collections.

    Attributes:
      registry: that registry.
      places: the addresses of the leaves in Linen variables, in order.
      addresses: the same as a set.
      rng: the indices of those that are RNG state.
      references: the indices of those whose Variable holds an array reference.
      special: the indices of those whose Variable does, of its own, or is a hijax one.
    """

    registry: registry.Registry
    places: tuple[Address, ...]
    addresses: frozenset[Address]
    rng: list[int]
    references: list[int]
    special: frozenset[int]

    def __new__(cls, graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Self:
        self = super().__new__(cls, _leaves(graphdef, active))
        self.registry = active
        self.places = tuple(slot.address for slot in self)
        self.addresses = frozenset(self.places)
        self.rng = [i for i, slot in enumerate(self) if slot.is_rng]
        self.references = [i for i, slot in enumerate(self) if slot.is_reference]
        self.special = frozenset(i for i, slot in enumerate(self) if slot.is_special)
        return self


def _leaves(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[GraphDefLeaf]:
    definitions: Any = graphdef.nodes
    references = [d.array_refdef for d in definitions if isinstance(d, VariableDef)]
    shared = {reference.index for reference in references if isinstance(reference, NodeRef)}
    for path, item in leaves_of(graphdef):
        if not isinstance(item, VariableDef):
            yield GraphDefLeaf(path, (ARRAYS, path), None, None, False, False, False, False)
            continue
        found: Any = item
        is_reference = found.array_refdef is not None
        is_shared = is_reference and found.array_refdef.index in shared
        yield GraphDefLeaf(
            path,
            (active.name_from_type(found.type), unplace(path, found.metadata.get(DISPLACED_KEY))),
            found.type,
            found.metadata,
            is_reference,
            not is_shared and (is_reference or found.metadata["hijax"]),
            issubclass(found.type, nnx.RngState),
            issubclass(found.type, nnx.Param | nnx.BatchStat),
        )
