"""Static attributes that refer to the module itself: a bound method, a lambda that uses `self`.

A GraphDef takes them as they are, so a merged module would call the module that it was split from:
with its parameters, without gradients. Here they are pickled with each node as its place in the
graph, and unpickled for every module that is made.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from bridge._errors import InvalidModuleError

from .graphdefs import IndexesPytreeDef, Static
from .objects import DATA_ATTRIBUTES, OBJECT_STATES, attributes_dict


class BoundCode:
    """A function without what it closes over; equal to another one of the same code."""

    def __init__(self, code: types.CodeType, scope: dict[str, Any], name: str, qualname: str):
        self.code, self.scope, self.name, self.qualname = code, scope, name, qualname

    def __eq__(self, other: object) -> bool:
        if type(other) is not BoundCode:
            return False
        return self.code == other.code and self.scope is other.scope

    def __hash__(self) -> int:
        return hash((self.code, id(self.scope)))

    def __call__(self, closure: tuple[types.CellType, ...] | None) -> Any:
        made = types.FunctionType(self.code, self.scope, self.name, None, closure)
        made.__qualname__ = self.qualname
        return made


# Written as they are.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})
# What no reference is followed from: it holds no object of a program, or all of them.
_ENDS = (
    *(type, types.CodeType, BoundCode, types.ModuleType, types.FrameType, types.TracebackType),
    *(np.ndarray, jax.Array, jax.sharding.Mesh, jax.sharding.Sharding),
)
FREE = _ATOMS | {type, types.CodeType, types.ModuleType, np.dtype, DATA_ATTRIBUTES, *OBJECT_STATES}
# Asked first, as most objects in attributes are.
_CONTAINERS = frozenset({types.CellType, tuple, list, set, frozenset, functools.partial})
# They have programs or results of a function, and by these anything.
_CACHES = ("jaxlib", "functools")
_NO_CACHES = (functools.partial, jax.tree_util.PyTreeDef)


class Tie:
    """A static attribute without the nodes of the module that it refers to.

    Two are equal if they are written alike and keep equal objects.

    Args:
      written: the pickle of all such attributes of a GraphDef.
      kept: the objects in them that refer to no node, which every module has in common.
      position: which of the attributes this is.
    """

    __slots__ = ("kept", "position", "written")

    def __init__(self, written: bytes, kept: tuple[Any, ...], position: int):
        self.written = written
        self.kept = kept
        self.position = position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tie):
            return False
        mine, theirs = (self.written, self.position), (other.written, other.position)
        return mine == theirs and _are_same(self.kept, other.kept)

    def __hash__(self) -> int:
        # Nothing of the objects: they may be arrays or lists.
        return hash((self.written, self.position))

    def __repr__(self) -> str:
        return f"Tie({self.position}, kept={self.kept})"


def untied(ties: Sequence[Tie], nodes: Mapping[int, Any]) -> list[Any]:
    """The attributes of a module with these nodes, in the order of their ties: those of it all."""
    made = _Reader(ties[0].written, ties[0].kept, nodes).load() if ties else ()
    return [made[tied.position] for tied in ties]


def tie(graphdef: nnx.GraphDef[Any], indices: Mapping[Any, int]) -> nnx.GraphDef[Any]:
    """A GraphDef whose static attributes hold no node of its module.

    Args:
      graphdef: a GraphDef in graph mode.
      indices: the index of every node.

    Raises:
      InvalidModuleError: one holds it in a way that nobody can follow.
    """
    references = NodeSearch({id(node): index for node, index in indices.items()})
    found: dict[int, tuple[Any, Any]] = {}
    attributes: Any = graphdef.attributes
    for i, (key, kind) in enumerate(attributes):
        value = kind.value if isinstance(kind, Static) else None
        if type(value) not in FREE and references.are_in(value):
            found[i] = key, value
    nodes: Any = graphdef.nodes
    for node in nodes:
        for value in _metadata_of(node):
            if type(value) not in FREE and references.are_in(value):
                raise _error(f"the metadata of a {node.type.__name__}", value, None)
    if not found:
        return graphdef
    written, kept = _pickled(found, references)
    tied = {
        i: (key, Static(Tie(written, kept, position)))
        for position, (i, (key, _)) in enumerate(found.items())
    }
    changed: Any = [tied.get(i, item) for i, item in enumerate(attributes)]
    return nnx.GraphDef(graphdef.nodes, changed, graphdef.num_leaves)


def _metadata_of(node: Any) -> Iterable[Any]:
    metadata: Any = getattr(node, "metadata", None)
    if isinstance(metadata, IndexesPytreeDef):
        kind, static = metadata.treedef.node_data() or (None, None)
        return () if kind in OBJECT_STATES else (static,)
    is_mapping = type(metadata) is DATA_ATTRIBUTES
    return attributes_dict(metadata).values() if is_mapping else (metadata,)


class NodeSearch:
    """Which objects refer to nodes, directly or through others.

    Args:
      nodes: the indices of what is looked for, by id; the caller holds the nodes.
    """

    def __init__(self, nodes: Mapping[int, int]):
        self.nodes = nodes
        # By id too, and held here, so that an id is nobody else's.
        self._free: dict[int, Any] = {}

    def are_in(self, value: Any) -> bool:
        """Whether a value is a node or refers to one."""
        if id(value) in self._free:
            return False
        met = {id(value): value}
        left = [value]
        while left:
            value = left.pop()
            if id(value) in self.nodes:
                return True
            for item in referents(value):
                number = id(item)
                if type(item) in FREE or number in met or number in self._free:
                    continue
                met[number] = item
                left.append(item)
        self._free |= met
        return False


def referents(value: Any) -> list[Any]:
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


def _pickled(
    attributes: Mapping[int, tuple[Any, Any]], references: NodeSearch
) -> tuple[bytes, tuple[Any, ...]]:
    """The pickle of attributes, and the objects that are not in it."""
    for name, value in attributes.values():
        # One by one, for the error; together, they may have objects in common.
        try:
            Writer(references).write([value])
        except InvalidModuleError:
            raise
        except Exception as error:
            raise _error(f"the attribute {str(name)!r}", value, error) from error
    return Writer(references).write([value for _, value in attributes.values()])


class Writer(pickle.Pickler):
    """Pickles what refers to nodes; a node is its index, and what refers to none is kept."""

    def __init__(self, references: NodeSearch):
        self._references = references
        self._file = io.BytesIO()
        self._kept: dict[int, tuple[int, Any]] = {}
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def write(self, values: list[Any]) -> tuple[bytes, tuple[Any, ...]]:
        self.dump(values)
        return self._file.getvalue(), tuple(value for _, value in self._kept.values())

    def persistent_id(self, obj: Any) -> int | None:
        """A node's index, a negative number for what is kept."""
        kind = type(obj)
        if kind in _ATOMS:
            return None
        if id(obj) in self._references.nodes:
            return self._references.nodes[id(obj)]
        # The types of what is below have no cell, for example, of their own.
        if kind is not types.CellType and not self._references.are_in(obj):
            return self._kept.setdefault(id(obj), (-1 - len(self._kept), obj))[0]
        return None

    def reducer_override(self, obj: Any) -> Any:
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
            self._kept[id(code)] = -1 - len(self._kept), code
            contents = [_contents_of(cell) for cell in obj.__closure__ or ()]
            # One tuple, as a list made here and kept would be another one each time.
            state = obj.__defaults__, obj.__kwdefaults__, obj.__dict__, *contents
            return code, (obj.__closure__,), state, None, None, _fill
        if type(obj) in weakref.ProxyTypes:
            return weakref.proxy, (obj.__reduce_ex__.__self__,)
        if isinstance(obj, weakref.ref):
            return weakref.ref, (obj(),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Makes what a `Writer` wrote, of other nodes."""

    def __init__(self, written: bytes, kept: tuple[Any, ...], nodes: Mapping[int, Any]):
        super().__init__(io.BytesIO(written))
        self._kept = kept
        self._nodes = nodes

    def persistent_load(self, pid: int) -> Any:
        return self._nodes[pid] if pid >= 0 else self._kept[-1 - pid]


def _fill(function: Any, state: tuple[Any, ...]) -> None:
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
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(a == b)


def _error(what: str, value: Any, cause: Exception | None) -> InvalidModuleError:
    return InvalidModuleError(
        f"{what} of a module in a ToLinen",
        value,
        "what can be made again for another module of its kind: a method, a lambda, a partial, an"
        " object that can be copied",
        "this one refers to the module, and stays with the one that it was made in"
        f"{f' ({cause})' if cause else ''}: make it a method of the class, or a submodule",
    )
