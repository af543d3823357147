"""How a ToLinen keeps a constructor's arguments, and what it knows about the constructor."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.linen_attributes import is_linen_style
from bridge._errors import InvalidModuleError
from bridge._fingerprint import fingerprint
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import StaticGraphDef


class Argument:
    """A constructor argument that cannot be hashed as it is: a list, a dict, a set or an array.

    Linen turns lists and dicts in a module's fields into tuples and FrozenDicts; this is opaque to
    it, so the constructor gets what the user gave.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self, value: Any):
        # Copy: the caller or the constructor may write into it later.
        self.held = _copied(value)

    @property
    def value(self) -> Any:
        """The argument as it was given, in containers of its own."""
        return _copied(self.held)

    def __hash__(self) -> int:
        return hash(fingerprint(self, ordered=False))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Argument):
            return False
        return fingerprint(self, ordered=False) == fingerprint(other, ordered=False)

    def __repr__(self) -> str:
        return repr(self.held)


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

    def __reduce__(self) -> Any:
        # A definition that cannot be pickled is left out of variables; here nothing rebuilds it.
        graphdef = self.graphdef
        parts = (graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
        return _existing, (parts, graphdef.avals, graphdef.given)

    def __hash__(self) -> int:
        return hash(self.graphdef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Existing) and self.graphdef == other.graphdef

    def __repr__(self) -> str:
        return f"<an existing {self.module_type.__name__}>"


def _existing(parts: tuple[Any, ...], avals: Any, given: Any) -> Existing:
    return Existing(static_graphdef.intern(nnx.GraphDef(*parts), avals, None, given))


def freeze_arguments(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], FrozenDict]:
    """The arguments in hashable form; doing it twice changes nothing."""
    frozen = {name: _freeze(value) for name, value in kwargs.items()}
    return tuple(_freeze(value) for value in args), FrozenDict(frozen)


def thaw(value: Any) -> Any:
    """The argument as it was given; the inverse of what `freeze_arguments` does to each."""
    return value.value if isinstance(value, Argument) else value


def arrays_in(value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The arrays in constructor arguments, and where: which item of which item.

    They are looked for in containers and in the attributes of plain objects, such as a
    configuration. Not in modules: what a module holds is its state.
    """
    seen: dict[int, Any] = {}
    pending: list[tuple[tuple[int, ...], Any]] = [((), value)]
    while pending:
        place, value = pending.pop()
        if value is None or type(value) in _PLAIN:
            # To ask of these whether they are arrays takes longer than all else here.
            continue
        if isinstance(value, jax.Array | np.ndarray):
            if not isinstance(value, jax.Ref):
                yield place, value
            continue
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        # Keep visited objects alive, so that no id is reused.
        seen[id(value)] = value
        if isinstance(value, Mapping):
            below = list(value.values())
        elif isinstance(value, list | tuple):
            below = list(value)
        else:
            below = list(getattr(value, "__dict__", {}).values())
        pending += [((*place, i), item) for i, item in enumerate(below)]


_PLAIN = frozenset((bool, int, float, complex, str, bytes))
# Linen's search for modules does not look inside these.
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


# These hold code, or the state of a module.
_CLOSED = (
    nnx.Pytree,
    nnx.Variable,
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
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


def takes_rngs(nnx_class: Any) -> bool:
    """Whether a constructor has a parameter `rngs`, or takes any keyword."""
    # The signature of an NNX class is that of its metaclass, which takes anything.
    is_class = isinstance(nnx_class, type)
    if is_linen_style(nnx_class):
        return True
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
    """A copy of containers and NumPy arrays."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return type(value)((k, _copied(v)) for k, v in value.items())
    if isinstance(value, list | set) or type(value) is tuple:
        return type(value)(map(_copied, value))
    return value
