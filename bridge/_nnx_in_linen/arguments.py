"""The arguments of a ToLinen: what fits, and how they are kept."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._errors import InvalidModuleError
from bridge._fingerprint import fingerprint
from bridge._graphdefs.static_graphdef import Given, StaticGraphDef


class _Given:
    """Constructor arguments, also those that cannot be hashed: lists, dicts, sets, arrays.

    Linen turns lists and dicts in a module's fields into tuples and FrozenDicts. It does not look
    into this object, which returns them as the user gave them, in containers of its own.
    """

    def __init__(self, held: Any):
        # Copy: the caller or the constructor may write into it later.
        self.held: Any = _copied(held)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, key: Any) -> Any:
        return _copied(self.held[key])

    def __hash__(self) -> int:
        return hash(fingerprint(self.held, ordered=False))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Given):
            return False
        return fingerprint(self.held, ordered=False) == fingerprint(other.held, ordered=False)

    def __repr__(self) -> str:
        return repr(self.held)


class GivenArgs(_Given, Sequence[Any]):
    """Such arguments by position."""


class GivenKwargs(_Given, Mapping[str, Any]):
    """Such arguments by name."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)


class Existing:
    """Stands in for the class of a module that exists: it has a GraphDef and no constructor."""

    def __init__(self, graphdef: StaticGraphDef):
        self.graphdef = graphdef

    @property
    def module_type(self) -> type:
        root: Any = self.graphdef.nodes[0]
        return root.type

    def __call__(self, *args: object, **kwargs: object) -> Any:
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


def _existing(parts: tuple[Any, ...], avals: tuple[Any, ...] | None, given: Given) -> Existing:
    return Existing(StaticGraphDef(nnx.GraphDef(*parts), avals, None, given))


def hashable_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments as Linen can keep them; doing it twice changes nothing."""
    if type(args) is not GivenArgs:
        args = tuple(args) if all(map(_is_hashable, args)) else GivenArgs(tuple(args))
    if type(kwargs) is not GivenKwargs:
        are_hashable = all(map(_is_hashable, kwargs.values()))
        kwargs = FrozenDict(kwargs) if are_hashable else GivenKwargs(dict(kwargs))
    return args, kwargs


def held_in(arguments: Any) -> Any:
    """What the fields of a ToLinen hold, to be looked at and not to be given to anyone."""
    return arguments.held if isinstance(arguments, _Given) else arguments


def check_class(nnx_class: Any) -> None:
    """Raises InvalidModuleError for what cannot be constructed as an NNX module."""
    given, target = nnx_class, nnx_class
    if isinstance(nnx_class, functools.partial):
        target = given.func
    owner: object = getattr(target, "__self__", None)
    if isinstance(target, type) and issubclass(target, nnx.Pytree):
        return
    if isinstance(target, Existing) or isinstance(owner, type):
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
    raise InvalidModuleError("ToLinen", given, expected, remedy)


def check_instance(module: object) -> None:
    """Raises InvalidModuleError for what is not an NNX module that exists."""
    given = module
    is_state = isinstance(module, nnx.State) or (
        isinstance(module, type) and issubclass(module, nnx.State)
    )
    if isinstance(module, nnx.Pytree) and not is_state:
        return
    if is_state:
        remedy = "put it together with its GraphDef: nnx.merge(graphdef, state)"
    elif isinstance(module, type) and issubclass(module, nnx.Pytree):
        name = module.__name__
        remedy = (
            f"for a class use ToLinen({name}, args=(…), kwargs={{…}}) or to_linen({name}, …); their"
            " init constructs the module"
        )
    elif isinstance(module, nn.Module) or (
        isinstance(module, type) and issubclass(module, nn.Module)
    ):
        remedy = (
            "it is Linen already, so use it as it is (ToNNX is the wrapper for the other direction)"
        )
    else:
        remedy = "pass an instance of a subclass of flax.nnx.Module"
    raise InvalidModuleError("ToLinen.from_module", given, "an NNX module instance", remedy)


def check_arguments(nnx_class: object, args: object, kwargs: Any) -> None:
    """Raises InvalidModuleError for `args` and `kwargs` that a constructor cannot take."""
    found_args, found_kwargs = args, kwargs
    is_list = isinstance(args, Sequence) and not isinstance(args, str)
    is_dict = isinstance(kwargs, Mapping) and all(isinstance(n, str) for n in found_kwargs)
    if is_list and is_dict:
        return
    name = getattr(nnx_class, "__name__", type(nnx_class).__name__)
    positional, by_name = "args as a tuple of positional arguments", "kwargs as a dict by name"
    expected = [*([] if is_list else [positional]), *([] if is_dict else [by_name])]
    found: Any = found_args, found_kwargs
    if is_list or is_dict:
        found = found_kwargs if is_list else found_args
    raise InvalidModuleError(
        f"ToLinen of {name}",
        found,
        " and ".join(expected),
        f"write ToLinen({name}, args=(…), kwargs={{…}}), or to_linen({name}, …) with the arguments"
        " as in the constructor's own call",
    )


def _is_hashable(value: object) -> bool:
    if isinstance(value, list | dict | set):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _copied(value: Any) -> Any:
    """A copy of containers and NumPy arrays."""
    held = value
    make = held.__class__
    if isinstance(value, np.ndarray):
        return held.copy()
    if isinstance(value, dict):
        return make((k, _copied(v)) for k, v in held.items())
    if isinstance(value, list | set) or type(value) is tuple:
        return make(map(_copied, held))
    return held
