"""Static attributes that refer to the module itself: a bound method, a lambda that uses `self`.

A GraphDef takes them as they are, so a merged module would call the module that it was split from:
with its parameters, without gradients. Here what they refer to is replaced by its place in the
graph, and put back for every module that is made.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from bridge._errors import InvalidModuleError

from .graphdefs import Static
from .objects import DATA_ATTRIBUTES, OBJECT_STATES

_FREE = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type, types.CodeType}
    | {types.BuiltinFunctionType, types.ModuleType, np.dtype, DATA_ATTRIBUTES, *OBJECT_STATES}
)
_ITEMS = (tuple, list, set, frozenset)
_EMPTY = types.CellType()
_NOTHING = ()


class Tie:
    """A static attribute without the nodes of the module that it refers to.

    Two are equal if they are made alike, of the same nodes, functions and values.

    Args:
      make: a function that makes a value of this kind out of its parts.
      parts: its parts: values, or ties in their turn.
    """

    __slots__ = ("make", "parts")

    def __init__(self, make: Callable[..., Any], parts: tuple[Any, ...]):
        self.make = make
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tie) or self.make != other.make:
            return False
        return _is_same(self.parts, other.parts)

    def __hash__(self) -> int:
        # Nothing of the values that functions close over: they may be arrays or lists.
        return hash((self.make, *(part for part in self.parts if type(part) is Tie)))

    def __repr__(self) -> str:
        return f"Tie({getattr(self.make, '__name__', self.make)}, {self.parts})"

    def bound(self, nodes: Mapping[int, Any]) -> Any:
        """The attribute of a module with these nodes."""
        if self.make is _node:
            return nodes[self.parts[0]]
        return self.make(*(p.bound(nodes) if type(p) is Tie else p for p in self.parts))


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if len(a) != len(b):
        return False
    for mine, theirs in zip(a, b, strict=True):
        if mine is theirs:
            continue
        if type(mine) is not type(theirs):
            return False
        if type(mine) is tuple:
            if not _is_same(mine, theirs):
                return False
        # Arrays are the same only if they are one.
        elif isinstance(mine, np.ndarray | jax.Array) or mine != theirs:
            return False
    return True


def tie(graphdef: nnx.GraphDef[Any], indices: Mapping[Any, int]) -> nnx.GraphDef[Any]:
    """A GraphDef whose static attributes hold no node of its module.

    Args:
      graphdef: a GraphDef in graph mode.
      indices: the index of every node.

    Raises:
      InvalidModuleError: an attribute holds one in a way that nobody can follow.
    """
    found: dict[int, Any] = {}
    # Layers of one kind have the same functions. What is in here is alive, so its id is its own.
    free: set[int] = set()
    attributes: Any = graphdef.attributes
    for i, (key, kind) in enumerate(attributes):
        if not isinstance(kind, Static):
            continue
        value = kind.value
        if type(value) in _FREE or id(value) in free:
            continue
        tied = _Search(indices, str(key)).run(value)
        if tied is value:
            free.add(id(value))
        else:
            found[i] = key, Static(tied)
    if not found:
        return graphdef
    attributes = [found.get(i, item) for i, item in enumerate(graphdef.attributes)]
    return nnx.GraphDef(graphdef.nodes, attributes, graphdef.num_leaves)


class _Search:
    """The way through one attribute's value."""

    def __init__(self, indices: Mapping[Any, int], name: str):
        self._indices = indices
        self._name = name
        # By id; what is in it is held by the value above it.
        self._above: set[int] = set()
        self._is_recursive = False

    def run(self, value: Any) -> Any:
        tied = self.tied(value)
        if tied is not value and self._is_recursive:
            raise self._error(value)
        return tied

    def tied(self, value: Any) -> Any:
        """The value itself if there is no node in it, else its tie."""
        kind = type(value)
        if kind in _FREE:
            return value
        if id(value) in self._above:
            # A function that uses itself: nothing new is to be found.
            self._is_recursive = True
            return value
        # Asked of no function, as most attributes are: this takes a call of Python.
        if kind is not types.FunctionType and value in self._indices:
            return Tie(_node, (self._indices[value],))
        self._above.add(id(value))
        tied = self._of_parts(kind, value)
        self._above.discard(id(value))
        return tied

    def _of_parts(self, kind: type, value: Any) -> Any:
        if kind is types.MethodType:
            return self._made(value, _method, (value.__func__, value.__self__))
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            keys, values = tuple(value.keywords), tuple(value.keywords.values())
            return self._made(value, _partial, (keys, value.func, *value.args, *values))
        if kind in _ITEMS:
            return self._made(value, _OF_ITEMS[kind], tuple(value))
        if kind is dict:
            return self._made(value, _dict, (tuple(value), *value.values()))
        # What `jax.jit` and `nnx.jit` make hides its function in a way of its own.
        if kind.__module__.startswith(_HIDING):
            for part in [getattr(value, name, None) for name in _HIDDEN]:
                if self.tied(part) is not part:
                    raise self._error(value)
        return value

    def _error(self, value: Any) -> InvalidModuleError:
        return InvalidModuleError(
            f"the attribute {self._name!r} of a module in a ToLinen",
            value,
            "a method, a lambda or a partial of its own module",
            "this one is compiled, cached or recursive, and stays with the module that it was made"
            " in: make it a method of the class, or a submodule",
        )

    def _function(self, value: Any) -> Any:
        own = value.__dict__
        cells = [_contents_of(cell) for cell in value.__closure__ or ()]
        if not cells and not value.__defaults__ and not value.__kwdefaults__ and not own:
            return value
        code = BoundCode(value.__code__, value.__globals__, value.__name__, value.__qualname__)
        by_name = tuple((value.__kwdefaults__ or {}).items())
        parts = tuple(cells), value.__defaults__, by_name, tuple(own.items())
        return self._made(value, code, parts)

    def _made(self, value: Any, make: Callable[..., Any], parts: tuple[Any, ...]) -> Any:
        tied = list(parts)
        is_same = True
        for i, part in enumerate(parts):
            if type(part) not in _FREE and part is not _NOTHING:
                tied[i] = self.tied(part)
                is_same = is_same and tied[i] is part
        return value if is_same else Tie(make, tuple(tied))


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

    def __call__(self, contents: Any, defaults: Any, by_name: Any, own: Any) -> Any:
        cells = tuple(
            types.CellType() if value is _EMPTY else types.CellType(value) for value in contents
        )
        made = types.FunctionType(self.code, self.scope, self.name, defaults, cells or None)
        made.__kwdefaults__ = dict(by_name) or None
        made.__qualname__ = self.qualname
        vars(made).update(own)
        return made


# Where callable objects of these libraries have their function.
_HIDING = ("jax", "flax.nnx", "functools")
_HIDDEN = ("__wrapped__", "fun", "f")


def _contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _node(index: int) -> Any:
    """Marks a tie that stands for a node."""
    raise NotImplementedError


def _method(function: Any, owner: Any) -> Any:
    return types.MethodType(function, owner)


def _partial(keys: tuple[str, ...], function: Any, *values: Any) -> Any:
    split = len(values) - len(keys)
    return functools.partial(
        function, *values[:split], **dict(zip(keys, values[split:], strict=True))
    )


def _dict(keys: tuple[Any, ...], *values: Any) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def _tuple(*items: Any) -> tuple[Any, ...]:
    return items


def _list(*items: Any) -> list[Any]:
    return list(items)


def _set(*items: Any) -> set[Any]:
    return set(items)


def _frozenset(*items: Any) -> frozenset[Any]:
    return frozenset(items)


_OF_ITEMS: Mapping[type, Callable[..., Any]] = {
    tuple: _tuple,
    list: _list,
    set: _set,
    frozenset: _frozenset,
}
