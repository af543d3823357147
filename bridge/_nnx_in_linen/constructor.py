"""The constructor of a ToLinen's module: the same one or another, and what it makes."""

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

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenStyle
from bridge._conversion.neutral import Address
from bridge._errors import MissingRngError, OuterStateError
from bridge._fingerprint import Look
from bridge._flax.flattening import flatten
from bridge._flax.linen_modules import detached
from bridge._flax.nodes import Nodes
from bridge._flax.objects import mark_arrays_as_data
from bridge._graphdefs.leaves import GraphDefLeaves
from bridge._graphdefs.static_graphdef import Given, Origin, StaticGraphDef
from bridge._module_calls import MODULE_CONTEXT, innermost
from bridge._randomness.streams import missing_stream
from bridge._sharding import eager

from .arguments import Existing, held_in


class Constructor(NamedTuple):
    """A constructor and its arguments, hashable.

    If `skip_rng` is set, `rngs` must not be passed. `eager_sharding` says whether annotated
    Variables are sharded when they are made; None follows Flax's own setting.
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
        # Items of a dict cost more to look at than a tuple of the same.
        args, kwargs = held_in(self.args), held_in(self.kwargs)
        return Look((self.nnx_class, args, tuple(kwargs.items()), *self[3:]))

    def made(self, graphdef: StaticGraphDef) -> bool:
        """Whether a GraphDef is that of the module this constructs, or what calls made of it."""
        origin = graphdef.origin
        if origin is None or isinstance(self.nnx_class, Existing):
            return True
        return origin.constructor == self.look().fingerprint

    def arguments(self) -> tuple[Any, Any]:
        """The constructor's arguments as they were given, in containers of their own."""
        return tuple(self.args), dict(self.kwargs)

    def kept(self, graphdef: StaticGraphDef) -> dict[Address, Any]:
        """The arrays among the arguments that a module keeps as they are, by address."""
        if not graphdef.given:
            return {}
        arrays = dict(arrays_in((self.arguments(), self.nnx_class)))
        return {(ARRAYS, path): arrays[p] for path, p in graphdef.given if p in arrays}

    def construct(
        self, streams: Mapping[str, Any], where: str, *, is_abstract: bool = False
    ) -> Constructed:
        """Constructs the NNX module; `streams` are keys by the stream names of `nnx.Rngs`.

        If `is_abstract`, only shapes and metadata count, and nothing is sharded.

        Raises:
          MissingRngError: the constructor draws from a stream that is not there.
          OuterStateError: it draws from one of the caller's, in a JAX transform.
        """
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
        places = {id(x): place for place, x in arrays_in((arguments, self.nnx_class))}
        return Constructed(module, nodes, _given(module, places) if places else ())


class Constructed(NamedTuple):
    """A module that was just constructed, and its nodes.

    `given` says which of its bare arrays are arguments of the constructor.
    """

    module: Any
    nodes: Nodes
    given: Given


def _given(module: nnx.Pytree, places: Mapping[int, tuple[int, ...]]) -> Given:
    """Which bare arrays of a module are among its constructor's arguments, by id."""
    graphdef, leaves = flatten(module)
    return tuple(
        (slot.path, places[id(leaf)])
        for slot, leaf in zip(GraphDefLeaves(graphdef, registry.current()), leaves, strict=True)
        if slot.var_type is None and id(leaf) in places
    )


def _with_own_streams(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of their streams: a trace must not move on those of the caller."""
    given = (*args, *kwargs.values())
    own = {id(x): nnx.clone(x) for x in given if isinstance(x, nnx.Rngs | nnx.RngStream)}
    copied = {name: own.get(id(x), x) for name, x in kwargs.items()}
    return tuple(own.get(id(x), x) for x in args), copied


def arrays_in(value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The arrays in constructor arguments, with the path to each.

    It searches containers, the arguments of partials, and the attributes of plain objects, such as
    a configuration. It does not search modules, because what a module holds is its state.
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
        held = below = value
        if isinstance(value, Mapping):
            below = held.values()
        elif isinstance(value, list | tuple):
            below = held
        elif isinstance(value, functools.partial):
            below = value.args, value.keywords
        else:
            below = getattr(value, "__dict__", {}).values()
        pending += [((*place, i), item) for i, item in enumerate(below)]


_PLAIN = frozenset((bool, int, float, complex, str, bytes))
# These hold code, or the state of a module.
_CLOSED = (
    nnx.Pytree,
    nnx.Variable,
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


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
