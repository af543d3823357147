"""References from a module's static attributes to its own nodes, such as a bound method.

A GraphDef takes them as they are, so a merged module would call the module that it was split from:
with its parameters, without gradients. A bound method is bound to the new module instead. What
refers to a node in another way, such as a lambda that uses `self`, is refused.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from bridge._errors import InvalidModuleError

from .graphdefs import Static, VariableDef, decoded, is_object
from .objects import DATA_ATTRIBUTES, ObjectState

_NODES = (nnx.Pytree, nnx.Variable)
# What no reference is followed from: it holds no object of a program, or all of them.
_ENDS = (
    *(type, types.CodeType, types.ModuleType, types.FrameType, types.TracebackType),
    *(np.ndarray, jax.Array, jax.sharding.Mesh, jax.sharding.Sharding),
)
_FREE = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})
_FREE |= {type, types.CodeType, types.ModuleType, np.dtype, DATA_ATTRIBUTES, ObjectState}
# Cheap test first, as most objects in attributes are of these types.
_CONTAINERS = frozenset({types.CellType, tuple, list, set, frozenset, functools.partial})
# They have programs or results of a function, and by these anything.
_CACHES = ("jaxlib", "functools")
_NO_CACHES = (functools.partial, jax.tree_util.PyTreeDef)


class OwnMethod(NamedTuple):
    """Stands in a GraphDef for a method that is bound to a node of the module.

    Attributes:
      function: the method's function.
      node: the node's index in the GraphDef.
    """

    function: types.FunctionType
    node: int


def without_nodes(graphdef: nnx.GraphDef[Any], indices: Mapping[Any, int]) -> nnx.GraphDef[Any]:
    """A GraphDef with an `OwnMethod` for every method that is bound to a node of its module.

    Args:
      graphdef: a GraphDef in graph mode.
      indices: the index of every node.

    Raises:
      InvalidModuleError: a static attribute refers to a node in another way.
    """
    numbers = {id(node): number for node, number in indices.items()}
    # What refers to no node. It is held, so that an id is nobody else's.
    known: dict[int, Any] = {}
    held: dict[int, Any] = {number: node for node, number in indices.items()}
    nodes: Any = graphdef.nodes
    for node in nodes:
        if isinstance(node, VariableDef):
            # Cheaper than the items of the node's own metadata.
            parts = held[node.index].get_metadata().values()
        else:
            parts = _static_of(getattr(node, "metadata", None))
        for value in parts:
            if type(value) not in _FREE and _refers(value, numbers, known):
                raise _error(f"the metadata of a {node.type.__name__}", value)
    attributes: list[Any] = list(graphdef.attributes)
    found = [
        i
        for i, (_, kind) in enumerate(attributes)
        if isinstance(kind, Static)
        and type(kind.value) not in _FREE
        and _refers(kind.value, numbers, known)
    ]
    if not found:
        return graphdef

    def own_method(value: object) -> Any:
        if not isinstance(value, types.MethodType) or id(value.__self__) not in numbers:
            return value
        function: Any = value.__func__
        return OwnMethod(function, numbers[id(value.__self__)])

    # The first is the root, which is no attribute.
    _, *places = decoded(graphdef)
    objects = {path for path, item in decoded(graphdef) if is_object(item)}
    for i in found:
        path, name, value = places[i][0], attributes[i][0], attributes[i][1].value
        replaced = with_others(value, own_method)
        if path[:-1] not in objects or _refers(replaced, numbers, known):
            raise _error(f"the attribute {'/'.join(map(str, path))!r}", value)
        attributes[i] = name, Static(replaced)
    return nnx.GraphDef(nodes, attributes, graphdef.num_leaves)


def with_nodes(value: object, nodes: Mapping[int, Any]) -> Any:
    """A static attribute with methods of these nodes, by index; the value if it has none."""

    def method(value: object) -> Any:
        is_own = isinstance(value, OwnMethod)
        return types.MethodType(value.function, nodes[value.node]) if is_own else value

    return with_others(value, method)


def has_methods(value: object) -> bool:
    """Whether there is an `OwnMethod` in a static attribute."""
    return with_nodes(value, collections.defaultdict(object)) is not value


def with_others(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value with other objects in it, in tuples, lists and dicts too; itself if all stay.

    Args:
      value: the value.
      other: what stands for an object from now on, or the object itself.
    """
    changed = other(value)
    kind = type(value)
    if changed is not value or kind not in (tuple, list, dict):
        return changed
    items = [*value, *value.values()] if kind is dict else value
    others = [with_others(item, other) for item in items]
    if all(a is b for a, b in zip(others, items, strict=True)):
        return value
    half = len(value)
    return dict(zip(others[:half], others[half:], strict=True)) if kind is dict else kind(others)


def _static_of(metadata: object) -> tuple[Any, ...]:
    """What a container that JAX knows holds beside its items."""
    treedef = getattr(metadata, "treedef", None)
    kind, static = (None, None) if treedef is None else treedef.node_data() or (None, None)
    return () if kind is ObjectState else (static,)


def nodes_in(value: object) -> list[Any]:
    """The modules and Variables that a value refers to, directly or through others."""
    return [x for x in _within(value, _NODES) if isinstance(x, _NODES)]


def arrays_within(value: object) -> list[jax.Array]:
    """The arrays that a value refers to, but for those of modules and Variables."""
    return [x for x in _within(value, _NODES) if isinstance(x, jax.Array)]


def _refers(value: object, wanted: Mapping[int, Any], known: dict[int, Any]) -> bool:
    """Whether a value is one of these objects, which are by id, or refers to one; notes if not."""
    if id(value) in known:
        return False
    met: dict[int, Any] = {}
    for item in _within(value, known=known):
        if id(item) in wanted:
            return True
        met[id(item)] = item
    known |= met
    return False


def _within(
    value: object,
    ends: tuple[type, ...] = (),
    known: Container[int] = (),
) -> Iterator[Any]:
    """A value and the objects that it refers to, directly or through others.

    Args:
      value: anything.
      ends: the types of objects below which nothing is looked for.
      known: the ids of objects that are left out.
    """
    # By id, and held, so that an id is nobody else's.
    met: dict[int, Any] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        number = id(value)
        if number in met or number in known or type(value) in _FREE:
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


def _error(what: str, value: object) -> InvalidModuleError:
    return InvalidModuleError(
        f"{what} of an NNX module that is made again",
        value,
        "a method of the module, or what does not refer to the module",
        "this one stays with the module that it was made in: make it a method of the class, or a"
        " submodule",
    )
