"""Where the leaves of a GraphDef are in Linen variables."""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import FrozenDict

import registry

from ._neutral import Address, Path, nest, unplace
from ._nnx_side import DISPLACED_KEY
from ._own_leaves import ARRAYS


class Slot(NamedTuple):
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
    ) -> Slot:
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
    def of_array(cls, path: Path) -> Slot:
        """The slot of a bare array."""
        return cls(path, (ARRAYS, path), None, None, False, False, False, False)


class Slots(Sequence[Slot]):
    """The slots of a GraphDef under one registry, in the order of its leaves.

    Args:
      graphdef: a GraphDef in graph mode.
      avals: shape and dtype of its leaves, None if they are not known.
      active: the registry that names the collections.

    Attributes:
      registry: that registry.
      addresses: the addresses of all slots.
      rng: the indices of those that are RNG state.
      references: the indices of those whose Variable holds an array reference.
      special: the indices of those whose Variable does, of its own, or is a hijax one.
    """

    def __init__(
        self, graphdef: nnx.GraphDef[Any], avals: Sequence[Any] | None, active: registry.Registry
    ):
        self._slots = tuple(_slots(graphdef, active))
        self._avals = avals
        self.registry = active
        self.addresses = frozenset(slot.address for slot in self._slots)
        self.rng = [i for i, slot in enumerate(self._slots) if slot.is_rng]
        self.references = [i for i, slot in enumerate(self._slots) if slot.is_reference]
        self.special = frozenset(i for i, slot in enumerate(self._slots) if slot.is_special)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: Any) -> Any:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def bare_values(self, variables: Mapping[str, Any]) -> list[Any] | None:
        """The value of every slot, if they all are bare arrays of the right shapes, and no more.

        That is so at almost every call, and then JAX reads the variables in a fraction of the time
        that it takes to look for each of them.

        Args:
          variables: nested mappings by collection, none of them empty.

        Returns:
          The values in the order of the slots. None if anything else is in the variables, or
          anything is missing in them, or it is not known what has to be there.
        """
        layout = self._layout
        if layout is None or len(variables) != len(layout.trees):
            return None
        found: list[Any] = []
        for collection, structures in layout.trees.items():
            tree = variables.get(collection)
            if type(tree) not in structures:
                return None
            leaves, structure = _flatten(tree)
            if structure is None or structure != structures[type(tree)]:
                return None
            found += leaves
        values = [found[i] for i in layout.order]
        fits = all(isinstance(value, jax.Array) for value in values)
        return values if fits and list(map(_shape, values)) == layout.shapes else None

    @functools.cached_property
    def _layout(self) -> _Layout | None:
        return None if self._avals is None else _Layout.of(self._slots, self._avals)


class _Layout(NamedTuple):
    """How JAX flattens variables that hold nothing but the values of some slots.

    Attributes:
      trees: the structures that each collection may have, by the type of its mapping.
      order: for each slot the index of its value among the leaves of all collections.
      shapes: the shape of each slot's value.
    """

    trees: Mapping[str, Mapping[type, Any]]
    order: list[int]
    shapes: list[Any]

    @classmethod
    def of(cls, slots: Sequence[Slot], avals: Sequence[Any]) -> _Layout | None:
        """The layout, None if variables of these slots cannot be read so."""
        shapes = [getattr(aval, "shape", None) for aval in avals]
        addresses = [slot.address for slot in slots]
        if None in shapes or not all(path for _, path in addresses):
            return None
        # As Linen has them, with strings for keys at the top.
        paths = [(collection, str(path[0]), *path[1:]) for collection, path in addresses]
        trees: dict[str, dict[type, Any]] = {}
        flat: list[int] = []
        for collection, tree in nest({path: i for i, path in enumerate(paths)}).items():
            leaves, structure = _flatten(tree)
            if structure is None:
                return None
            flat += leaves
            frozen = jax.tree_util.tree_structure(FrozenDict(tree))
            trees[collection] = {dict: structure, FrozenDict: frozen}
        position = {index: i for i, index in enumerate(flat)}
        return cls(trees, [position[i] for i in range(len(slots))], shapes)


_shape = operator.attrgetter("shape")


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; None for that of dicts whose keys JAX cannot sort."""
    try:
        return jax.tree_util.tree_flatten(tree)
    except ValueError:
        return [], None


def _slots(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[Slot]:
    """Walks the nodes of a GraphDef in the order in which its leaves are stored."""
    nodes = iter(graphdef.nodes)
    first = next(nodes, None)
    references = (getattr(node, "array_refdef", None) for node in graphdef.nodes)
    shared = {r.index for r in references if isinstance(r, nnx.graphlib.NodeRef)}
    return _slots_below(first, (), nodes, iter(graphdef.attributes), active, shared)


def _slots_below(
    node: Any,
    path: Path,
    nodes: Iterator[Any],
    attributes: Iterator[Any],
    active: registry.Registry,
    shared: Container[int],
) -> Iterator[Slot]:
    if isinstance(node, nnx.graphlib.VariableDef):
        reference = node.array_refdef
        # A reference that was met before has no leaf of its own.
        if not isinstance(reference, nnx.graphlib.NodeRef):
            is_shared = reference is not None and reference.index in shared
            yield Slot.of_variable(node, path, active, is_shared=is_shared)
    elif isinstance(node, nnx.graphlib.NodeDef):
        for _ in range(node.num_attributes):
            key, kind = next(attributes)
            if isinstance(kind, nnx.graphlib.NodeAttr):
                below = (*path, key)
                yield from _slots_below(next(nodes), below, nodes, attributes, active, shared)
            elif isinstance(kind, nnx.graphlib.LeafAttr):
                yield Slot.of_array((*path, key))
    elif isinstance(node, nnx.graphlib.ArrayRefDef):
        yield Slot.of_array(path)
