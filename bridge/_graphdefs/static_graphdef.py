"""The GraphDef as Linen variables hold it: static, hashed once, knowing where its leaves are."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
from flax import linen as nn
from flax import nnx, serialization

import registry
from bridge._conversion.neutral import Path
from bridge._errors import InvalidModuleError
from bridge._fingerprint import ByValue, Fingerprint, Look, told_by
from bridge._flax import graphdefs
from bridge._flax.flattening import GraphDefBuilder, flatten
from bridge._flax.nodes import nodes_among
from bridge._flax.objects import DATA_NOTE, ObjectState

from .leaves import GraphDefLeaves
from .structure import check_references

# The path of a bare array in the module, and its number among the objects in the arguments of the
# constructor.
Given: TypeAlias = tuple[tuple[Path, int], ...]


class Origin(NamedTuple):
    """What a module was constructed from.

    `constructor` is the fingerprint of the constructor and its arguments; `is_changed` says whether
    a call has given the module another definition.
    """

    constructor: Fingerprint
    is_changed: bool = False


class StaticGraphDef(nnx.GraphDef[Any]):
    """A GraphDef that computes its hash once, and is first compared by identity.

    `jax.jit` hashes and compares the static parts of its arguments at every call. Definitions that
    have been found equal have one fingerprint, so both cost nothing.

    It is a pytree without leaves. Its Variables are plain ones: neither references, because their
    updates look like reads, nor hijax Variables, which cannot be differentiated.

    Args:
      graphdef: any GraphDef in graph mode.
      avals: shape and dtype of every leaf at its creation, None if they are not known.
      origin: what the module was constructed from, None if that is not known.
      given: which bare arrays are arguments of the constructor.

    Attributes:
      is_bound: whether it is of a module that holds a bound Linen module, which has the variables
        of one call.
    """

    __slots__ = (
        "__weakref__",
        "_blueprint",
        "_hash",
        "_look",
        "_slots",
        "avals",
        "given",
        "is_bound",
        "origin",
    )

    avals: tuple[Any, ...] | None
    origin: Origin | None
    given: Given
    is_bound: bool

    # `nn.tabulate` writes down the fields of every dataclass in the variables: pages for a model.
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        avals: tuple[Any, ...] | None = None,
        origin: Origin | None = None,
        given: Given = (),
    ):
        nodes = _with_plain_variables(graphdef.nodes)
        super().__init__(nodes, graphdef.attributes, graphdef.num_leaves)
        facts = {"avals": avals, "origin": origin, "given": given, "is_bound": False}
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            object.__setattr__(self, "_hash", hash(self.look.fingerprint.key))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, nnx.GraphDef):
            return NotImplemented
        if not isinstance(other, StaticGraphDef):
            # As Flax compares them.
            theirs = other.num_leaves, other.nodes, other.attributes
            return (self.num_leaves, self.nodes, self.attributes) == theirs
        mine, theirs = self.look.fingerprint, other.look.fingerprint
        # One constructor, run twice, makes equal objects of what nobody can look into.
        is_equal = mine.key == theirs.key and (
            mine.identities == theirs.identities or _are_made_alike(self.origin, other.origin)
        )
        if is_equal:
            # The keys are long, and comparing one with itself takes no time.
            object.__setattr__(other, "_look", self.look)
        return is_equal

    def __repr__(self) -> str:
        # A model's variables are printed often, and the full definition is pages long.
        name = getattr(self.nodes[0], "type", type(None)).__name__ if self.nodes else None
        return f"{type(self).__name__}({name}, nodes={len(self.nodes)}, leaves={self.num_leaves})"

    def __reduce__(self) -> Any:
        # Definitions are code, and code need not pickle; the variables beside one do.
        written = _written(self.parts)
        return (dict, ()) if written is None else (_read, (written,))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        # By `__reduce__` it would be another one, of other objects.
        return self

    @property
    def parts(self) -> tuple[Any, ...]:
        """What a pickle holds of it."""
        return self.nodes, self.attributes, self.num_leaves, self.avals, self.given

    @property
    def look(self) -> Look:
        """What it held when it was first compared or stored.

        Python's `==` is no help: two lambdas made by the same line are never equal, arrays have no
        truth value, and 1 == 1.0 == True, although programs compute different things with them.
        """
        if not hasattr(self, "_look"):
            # A pytree of avals need not be hashable.
            shapes = [
                (x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else str(x)
                for x in self.avals or ()
            ]
            parts: list[Any] = [self.given]
            nodes: Any = self.nodes
            attributes: Any = self.attributes
            for node in nodes:
                metadata: Any = getattr(node, "metadata", None)
                treedef = getattr(metadata, "treedef", None)
                if treedef is not None:
                    # Of a container that JAX knows; Flax makes another tuple each time.
                    metadata = *metadata.key_index.items(), treedef
                about = getattr(node, "type", None), getattr(node, "num_attributes", None)
                parts.append((type(node).__name__, node.index, *about, metadata))
            for name, item in attributes:
                value = getattr(item, "value", None)
                # Names and booleans, which the note's own methods would return one after the other.
                held = repr(value) if name == DATA_NOTE else value
                parts.append((name, type(item).__name__, held))
            look = Look(parts, made=True)
            key, identities = look.fingerprint
            # Equal dtypes of keys may be one object or two, which a look would tell apart.
            look.fingerprint = Fingerprint((self.avals is None, *shapes, *key), identities)
            object.__setattr__(self, "_look", look)
        return self._look

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


told_by(StaticGraphDef, lambda graphdef: (ByValue(graphdef),))


# Not by `register_static`, which would flatten it by two functions of Python in every dispatch.
jax.tree_util.register_pytree_node(
    StaticGraphDef, lambda graphdef: ((), graphdef), lambda graphdef, _: graphdef
)


def as_static(graphdef: nnx.GraphDef[Any]) -> StaticGraphDef:
    """A GraphDef as variables hold it, the same one if it is that."""
    return graphdef if isinstance(graphdef, StaticGraphDef) else StaticGraphDef(graphdef)


def _with_plain_variables(nodes: Iterable[Any]) -> list[Any]:
    """The nodes of a GraphDef with Variables that are neither references nor hijax ones.

    Raises InvalidModuleError if two Variables hold one reference, because they would become two.
    """
    plain: list[Any] = []
    for node in nodes:
        metadata = node.metadata if isinstance(node, graphdefs.VariableDef) else {}
        if not (metadata.get("ref") or metadata.get("hijax")):
            plain.append(node)
            continue
        if isinstance(node.array_refdef, graphdefs.NodeRef):
            raise InvalidModuleError(
                "ToLinen",
                node.type.__name__,
                "Variables that hold references of their own",
                "two of them hold one: give them one Variable instead",
            )
        metadata = type(metadata)({**metadata, "ref": False, "hijax": False})
        plain.append(dataclasses.replace(node, metadata=metadata, array_refdef=None))
    return plain


def _are_made_alike(a: Origin | None, b: Origin | None) -> bool:
    """Whether one constructor with the same arguments made two modules, which no call changed."""
    return a is not None and a == b and not a.is_changed


def split(
    module: nnx.Pytree,
    origin: Origin | None = None,
    arrays: Mapping[int, Any] = MappingProxyType({}),
) -> tuple[StaticGraphDef, list[Any]]:
    """A module's GraphDef and its leaves (Variables and bare arrays) in order.

    `arrays` are those among the constructor's arguments, by their numbers.

    If an earlier GraphDef holds the very same objects, that one is returned, because its slots are
    known. Raises InvalidModuleError if a static attribute refers to a node of the module.
    """
    graphdef, leaves = flatten(module)
    numbers = {id(array): number for number, array in arrays.items()}
    places = graphdefs.leaves_of(graphdef) if numbers else ()
    given = [
        (path, numbers[id(leaf)])
        for (path, _), leaf in zip(places, leaves, strict=False)
        if id(leaf) in numbers
    ]
    static = StaticGraphDef(graphdef, tuple(map(_aval, leaves)), origin, tuple(given))
    key: list[Any] = [static.look.fingerprint, origin]
    is_bound = False
    if nodes_among(static.look.objects):
        check_references(graphdef, module)
    for held in static.look.objects:
        # Objects that hold the same now need not do so after a call; containers are the module's.
        if type(held) not in _CONTAINERS:
            key.append(id(held))
            is_bound |= isinstance(held, nn.Module) and held.scope is not None
    object.__setattr__(static, "is_bound", is_bound)
    with _lock:
        return _known.setdefault(tuple(key), static), leaves


_known: weakref.WeakValueDictionary[Any, StaticGraphDef] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_CONTAINERS = frozenset({list, dict, set, frozenset, ObjectState})


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


@dataclasses.dataclass(frozen=True)
class Indispensable:
    """A definition that no pickle leaves out: one that cannot be pickled raises."""

    graphdef: StaticGraphDef

    def __reduce__(self) -> Any:
        return _restore, self.graphdef.parts


def _restore(
    nodes: list[Any],
    attributes: list[Any],
    num_leaves: int,
    avals: tuple[Any, ...] | None,
    given: Given = (),
) -> StaticGraphDef:
    return StaticGraphDef(nnx.GraphDef(nodes, attributes, num_leaves), avals, None, given)


# A GraphDef is code, not data: a checkpoint holds an empty dict in its place, and restoring into
# variables that have one keeps it.
serialization.register_serialization_state(
    StaticGraphDef, lambda graphdef: {}, lambda graphdef, state: graphdef
)
