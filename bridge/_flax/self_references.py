"""Values that refer to a module's own nodes, such as a bound method or a lambda that uses `self`.

A GraphDef takes them as they are, so a merged module would call the module that it was split from:
with its parameters, without gradients. Here they are pickled with each node as its place in the
graph, and unpickled for every module that is made.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import pickle
import types
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from bridge._errors import InvalidModuleError

from .graphdefs import Static, VariableDef, decoded
from .objects import DATA_ATTRIBUTES, ObjectState


class BoundCode(NamedTuple):
    """A function without what it closes over."""

    code: types.CodeType
    scope: dict[str, Any]
    name: str
    qualname: str


_NODES = (nnx.Pytree, nnx.Variable)
# Written as they are.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})
# What no reference is followed from: it holds no object of a program, or all of them.
_ENDS = (
    *(type, types.CodeType, BoundCode, types.ModuleType, types.FrameType, types.TracebackType),
    *(np.ndarray, jax.Array, jax.sharding.Mesh, jax.sharding.Sharding),
)
_FREE = _ATOMS | {type, types.CodeType, types.ModuleType, np.dtype, DATA_ATTRIBUTES, ObjectState}
# Cheap test first, as most objects in attributes are of these types.
_CONTAINERS = frozenset({types.CellType, tuple, list, set, frozenset, functools.partial})
# They have programs or results of a function, and by these anything.
_CACHES = ("jaxlib", "functools")
_NO_CACHES = (functools.partial, jax.tree_util.PyTreeDef)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """A value without the nodes that it refers to.

    Attributes:
      written: the pickle of the value.
      kept: the objects in it that refer to no node, which all that are made of it have in common.
    """

    written: bytes
    kept: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        """Whether two are written alike and keep equal objects."""
        if not isinstance(other, Tie):
            return False
        return self.written == other.written and _are_same(self.kept, other.kept)

    def __hash__(self) -> int:
        # Nothing of the objects: they may be arrays or lists.
        return hash(self.written)


class TiedAttribute(NamedTuple):
    """Stands in a GraphDef for a static attribute that refers to nodes of the module.

    Attributes:
      tie: all such attributes of the GraphDef, in a list: they may have objects in common.
      position: which of them this is.
    """

    tie: Tie
    position: int


def tied(value: object, nodes: Mapping[int, Any] | Sequence[Any]) -> Tie:
    """A value without these nodes, which are by number.

    Raises:
      Exception: it holds one in a way that nobody can follow; anything that `pickle` raises.
    """
    numbered = nodes.items() if isinstance(nodes, Mapping) else enumerate(nodes)
    return _Writer(_NodeSearch({id(node): number for number, node in numbered})).write(value)


def value_of(tie: Tie, nodes: Mapping[int, Any] | Sequence[Any]) -> Any:
    """The value with other nodes by the same numbers; the inverse of `tied`."""
    return _Reader(tie, nodes).load()


def tie(graphdef: nnx.GraphDef[Any], indices: Mapping[Any, int]) -> nnx.GraphDef[Any]:
    """A GraphDef whose static attributes hold no node of its module.

    Args:
      graphdef: a GraphDef in graph mode.
      indices: the index of every node.

    Raises:
      InvalidModuleError: one holds it in a way that nobody can follow.
    """
    search = _NodeSearch({id(node): index for node, index in indices.items()})
    attributes: Any = graphdef.attributes
    found = {
        id(kind): i
        for i, (_, kind) in enumerate(attributes)
        if isinstance(kind, Static) and type(kind.value) not in _FREE and search.are_in(kind.value)
    }
    nodes: Any = graphdef.nodes
    held: dict[int, Any] = {index: node for node, index in indices.items()}
    for node in nodes:
        if isinstance(node, VariableDef):
            parts = held[node.index].get_metadata().values()
        else:
            parts = _static_of(getattr(node, "metadata", None))
        for value in parts:
            if type(value) not in _FREE and search.are_in(value):
                raise _error(f"the metadata of a {node.type.__name__}", value)
    if not found:
        return graphdef
    at = dict(decoded(graphdef))
    values = {path: item.value for path, item in at.items() if id(item) in found}
    written = _tie_of(values, search)
    changed: list[Any] = list(attributes)
    for position, path in enumerate(values):
        owner = at[path[:-1]]
        if not (isinstance(owner.type, type) and issubclass(owner.type, nnx.Pytree)):
            raise _error(f"the item {_text(path)!r}", values[path])
        changed[found[id(at[path])]] = path[-1], Static(TiedAttribute(written, position))
    return nnx.GraphDef(graphdef.nodes, changed, graphdef.num_leaves)


def _tie_of(values: Mapping[tuple[Any, ...], Any], search: _NodeSearch) -> Tie:
    try:
        return _Writer(search).write(list(values.values()))
    except Exception as error:
        for path, value in values.items():
            try:
                _Writer(search).write(value)
            except Exception as own:
                raise _error(f"the attribute {_text(path)!r}", value, own) from error
        raise


def _static_of(metadata: object) -> tuple[Any, ...]:
    """What a container that JAX knows holds beside its items."""
    treedef = getattr(metadata, "treedef", None)
    kind, static = (None, metadata) if treedef is None else treedef.node_data() or (None, None)
    return () if kind is ObjectState else (static,)


def nodes_in(value: object) -> list[Any]:
    """The modules and Variables that a value refers to, directly or through others."""
    return [x for x in _within(value, _NODES) if isinstance(x, _NODES)]


def arrays_within(value: object) -> list[jax.Array]:
    """The arrays that a value refers to, but for those of modules and Variables."""
    return [x for x in _within(value, _NODES) if isinstance(x, jax.Array)]


def _within(
    value: object,
    ends: tuple[type, ...] = (),
    wanted: Container[int] = (),
    known: Container[int] = (),
) -> Iterator[Any]:
    """A value and the objects that it refers to, directly or through others.

    Args:
      value: anything.
      ends: the types of objects below which nothing is looked for.
      wanted: the ids of objects that are met whatever they are, such as a class.
      known: the ids of objects that are left out.
    """
    # By id, and held, so that an id is nobody else's.
    met: dict[int, Any] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        number = id(value)
        if number in met or number in known or (type(value) in _FREE and number not in wanted):
            continue
        met[number] = value
        yield value
        if not isinstance(value, ends):
            pending += _referents(value)


def _referents(value: Any) -> list[Any]:
    """The objects that a value refers to, whatever it is."""
    kind = type(value)
    if kind is types.FunctionType:
        # Not its globals, which are everything.
        cells = value.__closure__ or ()
        return [*cells, value.__defaults__, value.__kwdefaults__, value.__dict__ or None]
    if kind in _CONTAINERS:
        return gc.get_referents(value)
    if kind in weakref.ProxyTypes:
        return [value.__reduce_ex__.__self__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, _ENDS):
        return []
    if _is_cache(kind):
        return [getattr(value, "__wrapped__", None)]
    if isinstance(value, dict):
        # Python 3.13 leaves the values of an object's `__dict__` to the object.
        return [*gc.get_referents(value), *dict.keys(value), *dict.values(value)]
    return gc.get_referents(value)


def _is_cache(kind: type) -> bool:
    return kind.__module__.startswith(_CACHES) and not issubclass(kind, _NO_CACHES)


class _NodeSearch:
    """Which objects refer to nodes, directly or through others.

    Args:
      nodes: the numbers of the nodes, by id; the caller holds the nodes.
    """

    def __init__(self, nodes: Mapping[int, int]):
        self.nodes = nodes
        # By id too, and held here, so that an id is nobody else's.
        self._free: dict[int, Any] = {}

    def are_in(self, value: object) -> bool:
        """Whether a value is a node or refers to one."""
        # Most values are those of other modules too.
        if id(value) in self._free:
            return False
        met: dict[int, Any] = {}
        for item in _within(value, wanted=self.nodes, known=self._free):
            if id(item) in self.nodes:
                return True
            met[id(item)] = item
        self._free |= met
        return False


class _Writer(pickle.Pickler):
    """Pickles what refers to nodes; a node is its number, and what refers to none is kept."""

    def __init__(self, search: _NodeSearch):
        self._search = search
        self._file = io.BytesIO()
        self._kept: dict[int, tuple[int, Any]] = {}
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def write(self, value: object) -> Tie:
        self.dump(value)
        return Tie(self._file.getvalue(), tuple(held for _, held in self._kept.values()))

    def persistent_id(self, obj: object) -> int | None:
        """A node's number, a negative one for what is kept."""
        kind = type(obj)
        if kind in _ATOMS:
            return None
        if id(obj) in self._search.nodes:
            return self._search.nodes[id(obj)]
        # A function fills its cells, so each needs its own.
        if kind is not types.CellType and not self._search.are_in(obj):
            return self._keep(obj)
        return None

    def _keep(self, obj: object) -> int:
        return self._kept.setdefault(id(obj), (-1 - len(self._kept), obj))[0]

    def reducer_override(self, obj: object) -> Any:
        """What makes an object anew that `pickle` has no way for, or another one."""
        if _is_cache(type(obj)):
            raise pickle.PicklingError("it is compiled or cached")
        if isinstance(obj, types.MethodType):
            # By its name it might be the method of a subclass.
            return types.MethodType, (obj.__func__, obj.__self__)
        if isinstance(obj, types.CellType):
            # Filled by the function, which may be in it.
            return types.CellType, ()
        if isinstance(obj, types.FunctionType):
            code = BoundCode(obj.__code__, obj.__globals__, obj.__name__, obj.__qualname__)
            self._keep(code)
            contents = [_contents_of(cell) for cell in obj.__closure__ or ()]
            # One tuple, as a list made here and kept would be another one each time.
            state = obj.__defaults__, obj.__kwdefaults__, obj.__dict__, *contents
            return _function, (code, obj.__closure__), state, None, None, _fill
        if type(obj) in weakref.ProxyTypes:
            return weakref.proxy, (obj.__reduce_ex__.__self__,)
        if isinstance(obj, weakref.ref):
            return weakref.ref, (obj(),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Makes what a `_Writer` wrote, of other nodes."""

    def __init__(self, tie: Tie, nodes: Mapping[int, Any] | Sequence[Any]):
        super().__init__(io.BytesIO(tie.written))
        self._kept = tie.kept
        self._nodes = nodes

    def persistent_load(self, pid: int) -> Any:
        return self._nodes[pid] if pid >= 0 else self._kept[-1 - pid]


def _function(bound: BoundCode, closure: tuple[types.CellType, ...] | None) -> Any:
    made = types.FunctionType(bound.code, bound.scope, bound.name, None, closure)
    made.__qualname__ = bound.qualname
    return made


def _fill(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Gives a function that was just made what it closes over, its defaults and attributes."""
    function.__defaults__, function.__kwdefaults__, attributes, *contents = state
    vars(function).update(attributes)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content is not types.CellType:
            cell.cell_contents = content


def _contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing was assigned yet.
        return types.CellType


def _are_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    # Arrays are the same only if they are one.
    if type(a) is not type(b) or isinstance(a, np.ndarray | jax.Array):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(_are_same(a[key], b[key]) for key in a)
    if type(a) in (tuple, list, BoundCode):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(a == b)


def _text(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _error(what: str, value: object, cause: Exception | None = None) -> InvalidModuleError:
    return InvalidModuleError(
        f"{what} of a module in a ToLinen",
        value,
        "what can be made again for another module of its kind: a method, a lambda, a partial, an"
        " object that can be copied",
        "this one refers to the module, and stays with the one that it was made in"
        f"{f' ({cause})' if cause else ''}: make it a method of the class, or a submodule",
    )
