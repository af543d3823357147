"""How a ToLinen keeps a constructor's arguments, and what it knows about the constructor."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from jax.core import Tracer

from ._errors import InvalidModuleError
from ._graphdef import StaticGraphDef
from ._typed_keys import to_bits


class Argument:
    """A constructor argument that cannot be hashed as it is: a list, a dict, a set or an array.

    Linen turns lists and dicts in a module's fields into tuples and FrozenDicts; this is opaque to
    it, so the constructor gets what the user gave.
    """

    __slots__ = ("_key", "_value")

    def __init__(self, value: Any):
        # The caller may write into it later, and so may the constructor.
        self._value = _copied(value)
        self._key = key_of(value)

    @property
    def value(self) -> Any:
        """The argument as it was given, in containers of its own."""
        return _copied(self._value)

    @property
    def is_traced(self) -> bool:
        """Whether an array in it belongs to a trace, and must not outlive it."""
        return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self._value))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Argument) and self._key == other._key

    def __repr__(self) -> str:
        return repr(self._value)


class Existing:
    """Stands in for the class of a module that exists: it has a GraphDef and no constructor.

    Args:
      graphdef: the module's GraphDef.
    """

    def __init__(self, graphdef: StaticGraphDef):
        self.graphdef = graphdef

    @property
    def module_type(self) -> type:
        root: Any = self.graphdef.nodes[0]
        return root.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidModuleError(
            "ToLinen.init",
            self.module_type,
            "a class to construct",
            "this ToLinen was made by from_module, use the variables that came with it",
        )

    def __hash__(self) -> int:
        return hash(self.graphdef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Existing) and self.graphdef == other.graphdef

    def __repr__(self) -> str:
        return f"<an existing {self.module_type.__name__}>"


def freeze_arguments(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], FrozenDict]:
    """The arguments in hashable form; doing it twice changes nothing."""
    frozen = {name: _freeze(value) for name, value in kwargs.items()}
    return tuple(_freeze(value) for value in args), FrozenDict(frozen)


def thaw(value: Any) -> Any:
    """The argument as it was given; the inverse of what `freeze_arguments` does to each."""
    return value.value if isinstance(value, Argument) else value


# Of these Linen's search for modules looks at no part.
_OPAQUE = (
    Argument,
    type,
    types.NoneType,
    types.FunctionType,
    types.BuiltinFunctionType,
    functools.partial,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.dtype,
    np.generic,
)


def holds_no_module(frozen: Any) -> bool:
    """Whether there is no Linen module in arguments, as far as can be told by their types."""
    if type(frozen) is tuple:
        return all(map(holds_no_module, frozen))
    if type(frozen) is FrozenDict:
        return all(map(holds_no_module, frozen.values()))
    return isinstance(frozen, _OPAQUE)


def check_class(nnx_class: Any) -> None:
    """Raises InvalidModuleError for what cannot be constructed as an NNX module."""
    target = nnx_class.func if isinstance(nnx_class, functools.partial) else nnx_class
    if isinstance(target, type) and issubclass(target, nnx.Pytree):
        return
    if isinstance(target, Existing) or isinstance(getattr(target, "__self__", None), type):
        # A class method that constructs, such as Model.from_config.
        return
    expected = "an NNX module class and its constructor arguments"
    if isinstance(target, nnx.Pytree):
        remedy = (
            f"for an instance use ToLinen.from_module({type(target).__name__.lower()}), which"
            f" returns the"
            " Linen module and its variables"
        )
    elif isinstance(target, type) and issubclass(target, nn.Module):
        remedy = (
            "it is Linen already, so use it as it is (ToNNX is the wrapper for the other direction)"
        )
    elif isinstance(target, nn.Module):
        remedy = "a Linen module needs no ToLinen (ToNNX is the wrapper for the other direction)"
    elif isinstance(target, types.FunctionType):
        remedy = "pass the class, and what the function passes to it as args= and kwargs="
    else:
        remedy = "pass a subclass of flax.nnx.Module"
    raise InvalidModuleError("ToLinen", nnx_class, expected, remedy)


@functools.lru_cache(maxsize=1024)
def takes_rngs(nnx_class: Any) -> bool:
    """Whether a constructor has a parameter `rngs`, or takes any keyword."""
    # The signature of an NNX class is that of its metaclass, which takes anything.
    is_class = isinstance(nnx_class, type)
    if is_class and nnx_class.__init__ is object.__init__:
        return False
    if isinstance(nnx_class, functools.partial):
        return "rngs" not in nnx_class.keywords and takes_rngs(nnx_class.func)
    parameters = inspect.signature(nnx_class.__init__ if is_class else nnx_class).parameters
    return "rngs" in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _freeze(value: Any) -> Any:
    if isinstance(value, Argument):
        return value
    if isinstance(value, list | dict | set):
        return Argument(value)
    try:
        hash(value)
    except TypeError:
        return Argument(value)
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return type(value)((k, _copied(v)) for k, v in value.items())
    if isinstance(value, list | set) or type(value) is tuple:
        return type(value)(_copied(v) for v in value)
    return value


class _Same:
    """Stands for an object that may change: equal to itself alone, and holds on to it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value


def _cell_key(value: Any) -> Any:
    if isinstance(value, types.FunctionType | functools.partial):
        return key_of(value)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


def key_of(value: Any) -> Any:
    """A key that is equal for equal arguments, functions that were made twice included."""
    if isinstance(value, Argument):
        return value
    if isinstance(value, functools.partial):
        keywords = frozenset((k, key_of(v)) for k, v in value.keywords.items())
        return functools.partial, key_of(value.func), tuple(map(key_of, value.args)), keywords
    if isinstance(value, types.FunctionType):
        # An initializer made in the body of a Linen module is another function at each call.
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, tuple(map(_cell_key, cells)), key_of(value.__defaults__)
    if isinstance(value, Mapping):
        return type(value), frozenset((k, key_of(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        items = map(key_of, value)
        return type(value), frozenset(items) if isinstance(value, set) else tuple(items)
    if isinstance(value, Tracer):
        return id(value)
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(to_bits(value))
        # The bits of a key do not tell which generator it is for.
        return array.shape, str(value.dtype), array.tobytes()
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
