"""The GraphDef as Linen variables hold it: static, hashed once, knowing where its leaves are."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import pickle
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
from flax import linen as nn
from flax import nnx, serialization

import registry
from bridge._conversion.neutral import Address, Path
from bridge._fingerprint import Fingerprint, Look, identity, told_by
from bridge._flax import graphdefs
from bridge._flax.flattening import GraphDefBuilder, flatten
from bridge._flax.objects import DATA_NOTE, ObjectState
from bridge._flax.self_references import OwnMethod

from .leaves import GraphDefLeaves

# The path of a bare array in the module, and where it is among the constructor's arguments.
Given: TypeAlias = tuple[tuple[Path, tuple[int, ...]], ...]


class Origin(NamedTuple):
    """What a module was constructed from.

    Attributes:
      constructor: the fingerprint of the constructor and its arguments.
      constructed: the definition of the module before a call gave it another one, None if none did.
    """

    constructor: Fingerprint
    constructed: StaticGraphDef | None = None


class Told(NamedTuple):
    """What a GraphDef holds.

    Attributes:
      fingerprint: its fingerprint.
      objects: as in `Look`, without containers, of which every module gets its own.
      is_bound: whether a bound Linen module is among them. That has the variables of one call, and
        every call has its own.
    """

    fingerprint: Fingerprint
    objects: list[Any]
    is_bound: bool


def told(graphdef: nnx.GraphDef[Any]) -> Told:
    """What a GraphDef holds at this moment, for whoever made it, whatever its attributes are.

    Python's own `==` does not tell: two lambdas of one line are never equal, an array has none, and
    1 == 1.0 == True, which programs compute different things with.
    """
    nodes: Any = graphdef.nodes
    attributes: Any = graphdef.attributes
    shape: list[Any] = [graphdef.num_leaves]
    parts: list[Any] = []
    for node in nodes:
        metadata: Any = getattr(node, "metadata", None)
        reference: Any = getattr(node, "array_refdef", None)
        shape += (type(node), node.index, getattr(node, "num_attributes", None))
        shape += (type(reference), getattr(reference, "index", None))
        treedef = getattr(metadata, "treedef", None)
        if treedef is not None:
            # Of a container that JAX knows; Flax makes another tuple each time.
            metadata = *metadata.key_index.items(), treedef
        parts += (getattr(node, "type", None), metadata)
    for name, kind in attributes:
        shape += (type(name), name, type(kind))
        value = getattr(kind, "value", None)
        # Names and booleans, which the note's own methods would return one after the other.
        parts.append(repr(value) if name == DATA_NOTE else value)
    look = Look(tuple(parts), made=True)
    key, identities = look.fingerprint
    objects: list[Any] = []
    is_bound = False
    for held in look.objects:
        if type(held) not in _CONTAINERS:
            objects.append(held)
            is_bound |= isinstance(held, nn.Module) and held.scope is not None
    return Told(Fingerprint((*shape, *key), identities), objects, is_bound)


_CONTAINERS = frozenset({list, dict, set, frozenset, OwnMethod, ObjectState})


class StaticGraphDef(nnx.GraphDef[Any]):
    """A GraphDef whose hash is computed once and which is first compared by identity.

    `jax.jit` hashes and compares the static parts of its arguments at every call. Equal GraphDefs
    are one object as long as somebody holds it (see `intern`), so both cost nothing.

    It is a pytree without leaves.

    Args:
      graphdef: any GraphDef in graph mode.
      avals: shape and dtype of every leaf at its creation, None if they are not known.
      origin: what the module was constructed from, None if that is not known.
      given: which bare arrays are arguments of the constructor.

    Attributes:
      shapes: the avals as what can be hashed.
    """

    __slots__ = (
        "__weakref__",
        "_blueprint",
        "_hash",
        "_slots",
        "_told",
        "avals",
        "given",
        "origin",
        "shapes",
    )

    avals: tuple[Any, ...] | None
    origin: Origin | None
    given: Given
    shapes: tuple[Any, ...] | None

    # `nn.tabulate` writes down the fields of every dataclass in the variables: pages for a model.
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        avals: tuple[Any, ...] | None = None,
        origin: Origin | None = None,
        given: Given = (),
    ):
        super().__init__(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
        shapes: list[Any] = []
        for aval in avals or ():
            is_array = isinstance(aval, jax.ShapeDtypeStruct)
            # A pytree of avals need not be hashable.
            shapes.append((aval.shape, aval.dtype) if is_array else str(aval))
        object.__setattr__(self, "shapes", avals and tuple(shapes))
        for name, value in (("avals", avals), ("origin", origin), ("given", given)):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            object.__setattr__(self, "_hash", hash(self.told.fingerprint.key))
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
        if self.given != (other.given if isinstance(other, StaticGraphDef) else ()):
            return False
        if not isinstance(other, StaticGraphDef):
            # As Flax compares them.
            theirs = other.num_leaves, other.nodes, other.attributes
            return (self.num_leaves, self.nodes, self.attributes) == theirs
        mine, theirs = self.told.fingerprint, other.told.fingerprint
        if mine.key != theirs.key:
            return False
        # One constructor, run twice, makes equal objects of what nobody can look into.
        return mine.identities == theirs.identities or _are_made_alike(self.origin, other.origin)

    def __repr__(self) -> str:
        # A model's variables are printed often, and the full definition is pages long.
        name = getattr(self.nodes[0], "type", type(None)).__name__ if self.nodes else None
        return f"{type(self).__name__}({name}, nodes={len(self.nodes)}, leaves={self.num_leaves})"

    def __reduce__(self) -> Any:
        # Definitions are code, and code need not pickle; the variables beside one do.
        parts = (self.nodes, self.attributes, self.num_leaves, self.avals, self.given)
        written = _written(parts)
        return (dict, ()) if written is None else (_read, (written,))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        # By `__reduce__` it would be another one, of other objects.
        return self

    @property
    def told(self) -> Told:
        """What it held when it was made, which is what programs are compiled with."""
        if not hasattr(self, "_told"):
            object.__setattr__(self, "_told", told(self))
        return self._told

    @property
    def blueprint(self) -> GraphDefBuilder:
        """What makes its modules."""
        if not hasattr(self, "_blueprint"):
            object.__setattr__(self, "_blueprint", GraphDefBuilder(self))
        return self._blueprint

    @property
    def slots(self) -> GraphDefLeaves:
        """Where every leaf comes from, in the order of the leaves."""
        active = registry.current()
        slots = getattr(self, "_slots", None)
        if slots is None or slots.registry is not active:
            # A scoped registry may name other collections.
            slots = GraphDefLeaves(self, active)
            object.__setattr__(self, "_slots", slots)
        return slots


told_by(StaticGraphDef, lambda graphdef: (identity(graphdef),))

_interned: weakref.WeakValueDictionary[int, StaticGraphDef] = weakref.WeakValueDictionary()
_lock = threading.Lock()


# Not by `register_static`, which would flatten it by two functions of Python in every dispatch.
jax.tree_util.register_pytree_node(
    StaticGraphDef, lambda graphdef: ((), graphdef), lambda graphdef, _: graphdef
)


def intern(
    graphdef: nnx.GraphDef[Any],
    avals: tuple[Any, ...] | None = None,
    origin: Origin | None = None,
    given: Given = (),
) -> StaticGraphDef:
    """The one `StaticGraphDef` of the very objects that a GraphDef consists of.

    Args:
      graphdef: any GraphDef in graph mode.
      avals: shape and dtype of its leaves.
      origin: what the module was constructed from.
      given: which bare arrays are arguments of the constructor.

    Returns:
      The same object for equal arguments, as far as they hold the same objects; without an origin,
      one that was made with any.
    """
    if isinstance(graphdef, StaticGraphDef):
        return graphdef
    static = StaticGraphDef(graphdef, avals, origin, given)
    mine = told(graphdef)
    object.__setattr__(static, "_told", mine)
    facts = mine.fingerprint.key, static.shapes
    with _lock:
        found = _interned.setdefault(hash((*facts, origin, given)), static)
        if origin is not None:
            # A pickle does not hold the origin.
            _interned.setdefault(hash((*facts, None, given)), found)
    # The key is a hash, so check for collisions.
    is_same = found is static or (
        found.told.fingerprint == mine.fingerprint
        and len(found.told.objects) == len(mine.objects)
        # They hold the same now, and need not after a call.
        and all(map(operator.is_, found.told.objects, mine.objects))
        and (found.shapes, found.given) == (static.shapes, given)
        and origin in (None, found.origin)
    )
    return found if is_same else static


def _are_made_alike(a: Origin | None, b: Origin | None) -> bool:
    """Whether one constructor with the same arguments made two modules, which no call changed."""
    return a is not None and a == b and a.constructed is None


def split(
    module: nnx.Pytree, origin: Origin | None = None, given: Given = ()
) -> tuple[StaticGraphDef, list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in order."""
    graphdef, leaves = flatten(module)
    return intern(graphdef, tuple(map(_aval, leaves)), origin, given), leaves


def with_given(graphdef: StaticGraphDef, given: Given) -> StaticGraphDef:
    """The GraphDef with other bare arrays noted as arguments of the constructor."""
    if graphdef.given == given:
        return graphdef
    plain = nnx.GraphDef(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
    return intern(plain, graphdef.avals, graphdef.origin, given)


def with_metadata(
    graphdef: StaticGraphDef, originals: Mapping[Address, Mapping[str, Any]]
) -> StaticGraphDef:
    """The GraphDef with other metadata for the Variables at some addresses.

    A Variable that holds a reference by that metadata gets one.
    """
    slots = graphdef.slots
    # A slot has the very metadata of its node.
    wanted = {id(s.metadata): originals[s.address] for s in slots if s.address in originals}
    unused = itertools.count(len(graphdef.nodes) + graphdef.num_leaves)
    nodes: list[Any] = []
    for node in graphdef.nodes:
        metadata = wanted.get(id(getattr(node, "metadata", None)))
        if metadata is None:
            nodes.append(node)
            continue
        reference = graphdefs.ArrayRefDef(next(unused), None) if metadata["ref"] else None
        nodes.append(dataclasses.replace(node, metadata=metadata, array_refdef=reference))
    changed = nnx.GraphDef(nodes, graphdef.attributes, graphdef.num_leaves)
    return intern(changed, graphdef.avals, graphdef.origin, graphdef.given)


def _aval(leaf: object) -> Any:
    """Shape and dtype of what a Variable reads as, or of a bare array."""
    value = leaf
    if isinstance(leaf, nnx.Variable):
        value = leaf.get_raw_value()
        # What `get_value` of Flax does beside: read a reference, run hooks, copy the containers of
        # a pytree. An array that nothing of this is for is its own result.
        is_plain = isinstance(value, jax.Array) and not leaf.hijax
        is_its_own = is_plain and type(leaf).get_value is _GET_VALUE
        if not is_its_own or leaf.has_metadata("on_get_value"):
            value = leaf.get_value()
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else None, value
    )


_GET_VALUE: Any = nnx.Variable.get_value


def _written(parts: tuple[Any, ...]) -> bytes | None:
    """The pickle of a definition's parts, None if they have none."""
    # Only the pickler that runs would tell which one it is: cloudpickle writes local classes too.
    for library in (pickle, sys.modules.get("cloudpickle")):
        try:
            return library.dumps(parts) if library else None
        except Exception:
            # An object that cannot be pickled may raise anything.
            continue
    return None


def _read(written: bytes) -> Any:
    """The definition, or what a checkpoint has in its place if its code is not there any more."""
    try:
        return _restore(*pickle.loads(written))
    except (ImportError, AttributeError):
        return {}


def _restore(
    nodes: list[Any],
    attributes: list[Any],
    num_leaves: int,
    avals: tuple[Any, ...] | None,
    given: Given = (),
) -> StaticGraphDef:
    return intern(nnx.GraphDef(nodes, attributes, num_leaves), avals, None, given)


# A GraphDef is code, not data: a checkpoint holds an empty dict in its place, and restoring into
# variables that have one keeps it.
serialization.register_serialization_state(
    StaticGraphDef, lambda graphdef: {}, lambda graphdef, state: graphdef
)
