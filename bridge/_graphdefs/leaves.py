"""Where the leaves of a GraphDef are in Linen variables."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx

import registry
from bridge._conversion.neutral import Address, Path, unplace
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._conversion.own_leaves import ARRAYS
from bridge._flax import graphdefs


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

    @classmethod
    def of_variable(
        cls, definition: Any, path: Path, active: registry.Registry, *, is_shared: bool
    ) -> GraphDefLeaf:
        """The slot of a Variable by its definition, and whether others hold its reference too."""
        displaced = definition.metadata.get(DISPLACED_KEY)
        is_reference = definition.array_refdef is not None
        return cls(
            path,
            (active.name_from_type(definition.type), unplace(path, displaced)),
            definition.type,
            definition.metadata,
            is_reference,
            not is_shared and (is_reference or definition.metadata["hijax"]),
            issubclass(definition.type, nnx.RngState),
            issubclass(definition.type, nnx.Param | nnx.BatchStat),
        )

    @classmethod
    def of_array(cls, path: Path) -> GraphDefLeaf:
        """The slot of a bare array."""
        return cls(path, (ARRAYS, path), None, None, False, False, False, False)


class GraphDefLeaves(Sequence[GraphDefLeaf]):
    """The slots of a GraphDef under one registry, in the order of its leaves.

    Args:
      graphdef: a GraphDef in graph mode.
      active: the registry that names the collections.

    Attributes:
      registry: that registry.
      addresses: the addresses of all slots.
      rng: the indices of those that are RNG state.
      references: the indices of those whose Variable holds an array reference.
      special: the indices of those whose Variable does, of its own, or is a hijax one.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any], active: registry.Registry):
        self._slots = tuple(_slots(graphdef, active))
        self.registry = active
        self.addresses = frozenset(slot.address for slot in self._slots)
        self.rng = [i for i, slot in enumerate(self._slots) if slot.is_rng]
        self.references = [i for i, slot in enumerate(self._slots) if slot.is_reference]
        self.special = frozenset(i for i, slot in enumerate(self._slots) if slot.is_special)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: Any) -> Any:
        return self._slots[index]

    def __iter__(self) -> Iterator[GraphDefLeaf]:
        return iter(self._slots)


def _slots(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[GraphDefLeaf]:
    """Walks the nodes of a GraphDef in the order in which its leaves are stored."""
    nodes = iter(graphdef.nodes)
    first = next(nodes, None)
    references: Any = (getattr(node, "array_refdef", None) for node in graphdef.nodes)
    shared = {r.index for r in references if isinstance(r, graphdefs.NodeRef)}
    return _slots_below(first, (), nodes, iter(graphdef.attributes), active, shared)


def _slots_below(
    node: Any,
    path: Path,
    nodes: Iterator[Any],
    attributes: Iterator[Any],
    active: registry.Registry,
    shared: Container[int],
) -> Iterator[GraphDefLeaf]:
    if isinstance(node, graphdefs.VariableDef):
        reference = node.array_refdef
        # A reference that was met before has no leaf of its own.
        if not isinstance(reference, graphdefs.NodeRef):
            is_shared = reference is not None and reference.index in shared
            yield GraphDefLeaf.of_variable(node, path, active, is_shared=is_shared)
    elif isinstance(node, graphdefs.NodeDef):
        for _ in range(node.num_attributes):
            key, kind = next(attributes)
            if isinstance(kind, graphdefs.NodeAttr):
                below = (*path, key)
                yield from _slots_below(next(nodes), below, nodes, attributes, active, shared)
            elif isinstance(kind, graphdefs.LeafAttr):
                yield GraphDefLeaf.of_array((*path, key))
    elif isinstance(node, graphdefs.ArrayRefDef):
        yield GraphDefLeaf.of_array(path)
