"""The constructor of a ToLinen's module: its arguments, whether it is the same, what it makes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenStyle
from bridge._conversion.neutral import Address
from bridge._errors import InvalidModuleError, MissingRngError, OuterStateError
from bridge._fingerprint import Look, fingerprint
from bridge._flax.linen_modules import detached
from bridge._flax.nodes import Nodes, items_of, nodes_below
from bridge._flax.objects import mark_arrays_as_data
from bridge._graphdefs.static_graphdef import Origin, StaticGraphDef
from bridge._module_calls import MODULE_CONTEXT, innermost
from bridge._randomness.streams import missing_stream
from bridge._sharding import eager


class Constructor(NamedTuple):
    """A constructor and its arguments, hashable.

    The `nnx_class` of a module that exists is its definition, which constructs nothing. If
    `skip_rng` is set, `rngs` must not be passed. `eager_sharding` says whether annotated Variables
    are sharded when they are made; None follows Flax's own setting.
    """

    nnx_class: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    skip_rng: bool
    eager_sharding: bool | None = None

    @property
    def origin(self) -> Origin:
        """What a GraphDef keeps of the constructor and its arguments, as they are now."""
        return Origin(self.look().fingerprint)

    def look(self) -> Look:
        """A look at the constructor and its arguments."""
        args = self.args.held if isinstance(self.args, _Given) else self.args
        kwargs = self.kwargs.held if isinstance(self.kwargs, _Given) else self.kwargs
        # Items of a dict cost more to look at than a tuple of the same.
        return Look((self.nnx_class, args, tuple(kwargs.items()), *self[3:]))

    def made(self, graphdef: StaticGraphDef) -> bool:
        """Whether a GraphDef is that of the module this constructs, or what calls made of it."""
        origin = graphdef.origin
        if origin is None or isinstance(self.nnx_class, StaticGraphDef):
            return True
        return origin.constructor == self.look().fingerprint

    def arguments(self) -> tuple[Any, Any]:
        """The constructor's arguments as they were given, in containers of their own."""
        return tuple(self.args), dict(self.kwargs)

    def kept(self, graphdef: StaticGraphDef) -> dict[Address, Any]:
        """The arrays among the arguments that a module keeps as they are, by address."""
        arrays = _arrays_in(self.nnx_class, *self.arguments())
        return {(ARRAYS, path): arrays[i] for path, i in graphdef.given if i in arrays}

    def construct(
        self, streams: Mapping[str, Any], where: str, *, is_abstract: bool = False
    ) -> Constructed:
        """Constructs the NNX module; `streams` are keys by the stream names of `nnx.Rngs`.

        If `is_abstract`, only shapes and metadata count, and nothing is sharded.

        Raises:
          MissingRngError: the constructor draws from a stream that is not there.
          OuterStateError: it draws from one of the caller's, in a JAX transform.
          InvalidModuleError: it is that of a module that exists.
        """
        if not callable(self.nnx_class):
            raise InvalidModuleError(
                "ToLinen.init",
                class_of(self.nnx_class),
                "a class to construct",
                "this ToLinen was made by from_module, use the variables that came with it",
            )
        arguments: list[Any] = []

        def construct() -> Any:
            arguments[:] = self.arguments()
            args, kwargs = arguments
            made_by: Any = self.nnx_class
            held: Any = made_by
            if is_abstract:
                if isinstance(made_by, functools.partial):
                    args, kwargs = (*held.args, *args), {**held.keywords, **kwargs}
                    made_by = held.func
                args, kwargs = _with_own_streams(args, kwargs)
            kwargs = dict(kwargs)
            if not self.skip_rng and "rngs" not in kwargs and takes_rngs(self.nnx_class):
                kwargs["rngs"] = nnx.Rngs(**streams)
            is_alone = MODULE_CONTEXT.module_stack[-1] is None
            with detached(), contextlib.nullcontext() if is_alone else innermost(None):
                return made_by(*args, **kwargs)

        if is_abstract and nnx.var_defaults().hijax:
            # In a trace, no key can be drawn from a hijax stream.
            with nnx.var_defaults(hijax=False):
                return self.construct(streams, where, is_abstract=True)

        try:
            module, nodes = eager.constructed(
                construct, self.eager_sharding, where, is_abstract=is_abstract
            )
        except flax_errors.TraceContextError as error:
            raise OuterStateError(where, str(error)) from error
        except (AttributeError, KeyError) as error:
            wanted = missing_stream(error)
            if wanted is None:
                raise
            raise MissingRngError(
                f"the constructor of {where}",
                [wanted],
                streams,
                f"pass a key, or {{{wanted!r}: key}}, to init",
            ) from error
        mark_arrays_as_data(nodes.objects)
        return Constructed(module, nodes, _arrays_in(self.nnx_class, *arguments))


class Constructed(NamedTuple):
    """A module that was just constructed, its nodes, and the arrays among its arguments."""

    module: Any
    nodes: Nodes
    arrays: Mapping[int, Any]


def _arrays_in(nnx_class: object, args: object, kwargs: Mapping[str, Any]) -> dict[int, Any]:
    """The arrays in constructor arguments, by their numbers among all objects in these.

    Those in modules are not among them, because what a module holds is its state.
    """
    objects = Look((nnx_class, args, tuple(kwargs.items()))).objects
    arrays = {
        number: item
        for number, item in enumerate(objects)
        if isinstance(item, _ARRAYS) and not isinstance(item, jax.Ref)
    }
    if not arrays:
        return {}
    nodes = nodes_below([item for item in objects if isinstance(item, nnx.Pytree)])
    held: list[Any] = [
        *(vars(node).values() for node in nodes.objects),
        *map(items_of, nodes.others[1:]),
    ]
    state = {id(item) for items in held for item in items or ()}
    return {number: item for number, item in arrays.items() if id(item) not in state}


# Named, as a check of the type itself would narrow what is checked to an ndarray of unknown items.
_ARRAYS: Any = (jax.Array, np.ndarray)


def _with_own_streams(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of their streams: a trace must not move on those of the caller."""
    given = (*args, *kwargs.values())
    own = {id(x): nnx.clone(x) for x in given if isinstance(x, nnx.Rngs | nnx.RngStream)}
    copied = {name: own.get(id(x), x) for name, x in kwargs.items()}
    return tuple(own.get(id(x), x) for x in args), copied


def takes_rngs(nnx_class: Callable[..., Any]) -> bool:
    """Whether a constructor has a parameter `rngs`, or takes any keyword."""
    # The signature of an NNX class is that of its metaclass, which takes anything.
    is_class = isinstance(nnx_class, type)
    if is_class and nnx_class.__init__ is object.__init__:
        return False
    if isinstance(nnx_class, functools.partial):
        return "rngs" not in nnx_class.keywords and takes_rngs(nnx_class.func)
    parameters = inspect.signature(nnx_class.__init__ if is_class else nnx_class).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    is_linen_style = is_class and issubclass(nnx_class, LinenStyle)
    return "rngs" in parameters or takes_any or is_linen_style


def class_of(nnx_class: object) -> Any:
    """The class behind a partial of it, or that of a module that exists."""
    if isinstance(nnx_class, StaticGraphDef):
        root: Any = nnx_class.nodes[0]
        return root.type
    held: Any = nnx_class
    return held.func if isinstance(nnx_class, functools.partial) else nnx_class


class _Given:
    """Constructor arguments, also those that cannot be hashed: lists, dicts, sets, arrays.

    Linen turns lists and dicts in a module's fields into tuples and FrozenDicts. It does not look
    into this object, which returns them as the user gave them, in containers of its own.
    """

    def __init__(self, held: Sequence[Any] | Mapping[str, Any]):
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


def hashable_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments as Linen can keep them; doing it twice changes nothing."""
    if type(args) is not GivenArgs:
        args = tuple(args) if all(map(_is_hashable, args)) else GivenArgs(tuple(args))
    if type(kwargs) is not GivenKwargs:
        are_hashable = all(map(_is_hashable, kwargs.values()))
        kwargs = FrozenDict(kwargs) if are_hashable else GivenKwargs(dict(kwargs))
    return args, kwargs


def check_class(nnx_class: object) -> None:
    """Raises InvalidModuleError for what cannot be constructed as an NNX module."""
    given: Any = nnx_class
    if not isinstance(nnx_class, type):
        given = class_of(given)
    target = given
    # A class method that constructs, such as Model.from_config, is bound to a class.
    is_class_method = isinstance(getattr(target, "__self__", None), type)
    if is_class_method or (isinstance(target, type) and issubclass(target, nnx.Pytree)):
        return
    if isinstance(target, nnx.Pytree):
        name: str = given.__class__.__name__
        remedy = (
            f"for an instance use ToLinen.from_module({name.lower()}), which"
            " returns the Linen module and its variables"
        )
    elif isinstance(target, types.FunctionType):
        remedy = "pass the class, and what the function passes to it as args= and kwargs="
    else:
        remedy = _remedy(given, "a subclass")
    expected = "an NNX module class and its constructor arguments"
    raise InvalidModuleError("ToLinen", nnx_class, expected, remedy)


def check_instance(module: object) -> None:
    """Raises InvalidModuleError for what is not an NNX module that exists."""
    kind = module if isinstance(module, type) else type(module)
    if issubclass(kind, nnx.State):
        remedy = "put it together with its GraphDef: nnx.merge(graphdef, state)"
    elif isinstance(module, nnx.Pytree):
        return
    elif issubclass(kind, nnx.Pytree):
        remedy = (
            f"for a class use ToLinen({kind.__name__}, args=(…), kwargs={{…}}) or"
            f" to_linen({kind.__name__}, …); their init constructs the module"
        )
    else:
        remedy = _remedy(module, "an instance of a subclass")
    raise InvalidModuleError("ToLinen.from_module", module, "an NNX module instance", remedy)


def _remedy(given: object, wanted: str) -> str:
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, nn.Module):
        return (
            "it is Linen already, so use it as it is (ToNNX is the wrapper for the other direction)"
        )
    return f"pass {wanted} of flax.nnx.Module"


def check_arguments(nnx_class: object, args: object, kwargs: object) -> None:
    """Raises InvalidModuleError for `args` and `kwargs` that a constructor cannot take."""
    names: Any = kwargs
    wrong: dict[str, Any] = {}
    if not isinstance(args, Sequence) or isinstance(args, str):
        wrong["args as a tuple of positional arguments"] = args
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in names):
        wrong["kwargs as a dict by name"] = kwargs
    if not wrong:
        return
    name = getattr(nnx_class, "__name__", type(nnx_class).__name__)
    found: Any = tuple(wrong.values())
    raise InvalidModuleError(
        f"ToLinen of {name}",
        found if len(found) > 1 else found[0],
        " and ".join(wrong),
        f"write ToLinen({name}, args=(…), kwargs={{…}}), or to_linen({name}, …) with the arguments"
        " as in the constructor's own call",
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _copied(value: object) -> Any:
    """A copy of containers and NumPy arrays."""
    held: Any = value
    make = held.__class__
    if isinstance(value, np.ndarray):
        return held.copy()
    if isinstance(value, dict):
        return make((k, _copied(v)) for k, v in held.items())
    if isinstance(value, list | set) or type(value) is tuple:
        return make(map(_copied, held))
    return held
