"""Where the leaves of a GraphDef are in Linen variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.neutral import Address, Path, unplace
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._flax.graphdef_nodes import ArrayLeaf, VariableNode, decode, nodes_of_arrays


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
        cls, node: VariableNode, path: Path, active: registry.Registry, *, is_shared: bool
    ) -> GraphDefLeaf:
        """The leaf of a Variable, and whether others hold its reference too."""
        displaced = node.metadata.get(DISPLACED_KEY)
        is_reference = node.reference is not None
        return cls(
            path,
            (active.name_from_type(node.type), unplace(path, displaced)),
            node.type,
            node.metadata,
            is_reference,
            not is_shared and (is_reference or node.metadata["hijax"]),
            issubclass(node.type, nnx.RngState),
            issubclass(node.type, nnx.Param | nnx.BatchStat),
        )

    @classmethod
    def of_array(cls, path: Path) -> GraphDefLeaf:
        """The leaf of a bare array."""
        return cls(path, (ARRAYS, path), None, None, False, False, False, False)


class GraphDefLeaves(Sequence[GraphDefLeaf]):
    """The leaves of a GraphDef under one registry, in the order of its leaves.

    Args:
      graphdef: a GraphDef in graph mode.
      active: the registry that names the collections.

    Attributes:
      registry: that registry.
      addresses: the addresses of all leaves.
      rng: the indices of those that are RNG state.
      references: the indices of those whose Variable holds an array reference.
      special: the indices of those whose Variable does, of its own, or is a hijax one.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any], active: registry.Registry):
        self._leaves = tuple(_leaves(graphdef, active))
        self.registry = active
        self.addresses = frozenset(slot.address for slot in self._leaves)
        self.rng = [i for i, slot in enumerate(self._leaves) if slot.is_rng]
        self.references = [i for i, slot in enumerate(self._leaves) if slot.is_reference]
        self.special = frozenset(i for i, slot in enumerate(self._leaves) if slot.is_special)

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, index: Any) -> Any:
        return self._leaves[index]

    def __iter__(self) -> Iterator[GraphDefLeaf]:
        return iter(self._leaves)


def _leaves(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[GraphDefLeaf]:
    nodes = nodes_of_arrays(decode(graphdef))
    variables = [node for _, node in nodes if isinstance(node, VariableNode)]
    shared = {node.reference for node in variables if not node.has_leaf}
    for path, node in nodes:
        if isinstance(node, ArrayLeaf):
            yield GraphDefLeaf.of_array(path)
        elif node.has_leaf:
            yield GraphDefLeaf.of_variable(node, path, active, is_shared=node.reference in shared)
