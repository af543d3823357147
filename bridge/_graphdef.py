"""The GraphDef as Linen variables hold it: static, hashed once, knowing where its leaves are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx, serialization

import registry

from ._neutral import Address, Path, unplace
from ._nnx_side import ARRAYS, DISPLACED_KEY


class Slot(NamedTuple):
    """Where one leaf of a GraphDef comes from.

    Attributes:
      path: the path in the NNX module.
      address: the (collection, path) in Linen variables.
      var_type: the Variable type, None for a bare array.
      node: the index of the Variable among the GraphDef's nodes, None for a bare array.
      metadata: the Variable's metadata.
    """

    path: Path
    address: Address
    var_type: type[nnx.Variable[Any]] | None
    node: int | None
    metadata: Any

    @property
    def is_rng(self) -> bool:
        """Whether this is the key or the count of an RNG stream."""
        return self.var_type is not None and issubclass(self.var_type, nnx.RngState)


@jax.tree_util.register_static
class StaticGraphDef(nnx.GraphDef[Any]):
    """A GraphDef whose hash is computed once and which is first compared by identity.

    `jax.jit` hashes and compares the static parts of its arguments at every call. Equal GraphDefs
    are one object as long as somebody holds it (see `intern`), so both cost nothing.
    """

    __slots__ = ("__weakref__", "_avals", "_hash", "_recipe", "_slots")

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            object.__setattr__(self, "_hash", super().__hash__())
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, nnx.GraphDef):
            return NotImplemented
        # A wrapped Linen module has shapes that its GraphDef does not tell.
        avals = (self.avals, other.avals if isinstance(other, StaticGraphDef) else None)
        if None not in avals and avals[0] != avals[1]:
            return False
        return (self.num_leaves, self.nodes, self.attributes) == (
            other.num_leaves,
            other.nodes,
            other.attributes,
        )

    def __repr__(self) -> str:
        # A model's variables are printed often, and the full definition is pages long.
        name = getattr(self.nodes[0], "type", type(None)).__name__ if self.nodes else None
        return f"{type(self).__name__}({name}, nodes={len(self.nodes)}, leaves={self.num_leaves})"

    def __reduce__(self) -> Any:
        return _restore, (self.nodes, self.attributes, self.num_leaves, self.avals)

    @property
    def avals(self) -> tuple[Any, ...] | None:
        """Shape and dtype of every leaf at its creation, None if they are not known."""
        return getattr(self, "_avals", None)

    @property
    def recipe(self) -> Any:
        """What the module was constructed from, None if that is not known."""
        return getattr(self, "_recipe", None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Where every leaf comes from, in the order of the leaves."""
        active = registry.current()
        cached = getattr(self, "_slots", None)
        if cached is None or cached[0] is not active:
            # A scoped registry may name other collections.
            cached = active, tuple(_slots(self, active))
            object.__setattr__(self, "_slots", cached)
        return cached[1]


_interned: weakref.WeakValueDictionary[int, StaticGraphDef] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def intern(
    graphdef: nnx.GraphDef[Any], avals: tuple[Any, ...] | None = None, recipe: Any = None
) -> StaticGraphDef:
    """The one `StaticGraphDef` that equals a GraphDef.

    Args:
      graphdef: any GraphDef in graph mode.
      avals: shape and dtype of its leaves.
      recipe: what the module was constructed from, hashable.

    Returns:
      The same object for equal arguments, unless they hold something that cannot be hashed; without
      a recipe, one that was made with any.
    """
    if isinstance(graphdef, StaticGraphDef):
        return graphdef
    static = StaticGraphDef(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
    object.__setattr__(static, "_avals", avals)
    object.__setattr__(static, "_recipe", recipe)
    try:
        key = hash((static, str(avals), recipe))
    except TypeError:
        return static
    with _lock:
        found = _interned.setdefault(key, static)
        if recipe is not None:
            # What comes back from a pickle does not know its recipe.
            _interned.setdefault(hash((static, str(avals), None)), found)
    is_same = found == static and found.avals == avals and recipe in (None, found.recipe)
    return found if is_same else static


def split(module: nnx.Pytree, recipe: Any = None) -> tuple[StaticGraphDef, list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in order."""
    graphdef, state = nnx.split(module, graph=True)
    leaves = [leaf for _, leaf in nnx.to_flat_state(state)]
    avals = tuple(
        _aval(leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf) for leaf in leaves
    )
    return intern(graphdef, avals, recipe), leaves


def _aval(value: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else None, value
    )


def _restore(
    nodes: Any, attributes: Any, num_leaves: int, avals: tuple[Any, ...] | None
) -> StaticGraphDef:
    return intern(nnx.GraphDef(nodes, attributes, num_leaves), avals)


def _slots(graphdef: nnx.GraphDef[Any], active: registry.Registry) -> Iterator[Slot]:
    """Walks the nodes of a GraphDef in the order in which its leaves are stored."""
    nodes = iter(graphdef.nodes)
    attributes = iter(graphdef.attributes)

    def walk(node: Any, path: Path) -> Iterator[Slot]:
        if isinstance(node, nnx.graphlib.VariableDef):
            # A reference that was met before has no leaf of its own.
            if not isinstance(node.array_refdef, nnx.graphlib.NodeRef):
                displaced = node.metadata.get(DISPLACED_KEY)
                address = active.name_from_type(node.type), unplace(path, displaced)
                yield Slot(path, address, node.type, node.index, node.metadata)
        elif isinstance(node, nnx.graphlib.NodeDef):
            for _ in range(node.num_attributes):
                key, kind = next(attributes)
                if isinstance(kind, nnx.graphlib.NodeAttr):
                    yield from walk(next(nodes), (*path, key))
                elif isinstance(kind, nnx.graphlib.LeafAttr):
                    yield Slot((*path, key), (ARRAYS, (*path, key)), None, None, None)
        elif isinstance(node, nnx.graphlib.ArrayRefDef):
            yield Slot(path, (ARRAYS, path), None, None, None)

    first = next(nodes, None)
    return walk(first, ())


# A GraphDef is code, not data: a checkpoint holds an empty dict in its place, and restoring into
# variables that have one keeps it.
serialization.register_serialization_state(
    StaticGraphDef, lambda graphdef: {}, lambda graphdef, state: graphdef
)
