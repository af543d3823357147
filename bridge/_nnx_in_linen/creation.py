"""Creates the variables of a ToLinen: its module as constructed, and what a call creates."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from flax import nnx
from jax.core import Tracer

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder, held_variables
from bridge._conversion.neutral import Address
from bridge._errors import MismatchError, MissingInputsError, path_text
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import Origin, StaticGraphDef
from bridge._initialization.lazy_init import initialized

from . import definitions
from .bound_module import Call, method_of
from .matched_variables import overlay
from .module_views import SHOWN, showing, unshow
from .scope import WrapperScope


def create(
    scope: WrapperScope, leaves: Mapping[Address, Any], call: Call
) -> tuple[Any, StaticGraphDef]:
    """Constructs the module, and writes it and what the call creates.

    The `leaves` that are there stay as they are. Returns the call's output and the definition.
    """
    scope.store_graphdef(None)
    constructor, keys = scope.constructor, scope.constructor_keys()
    module, nodes, given = constructor.construct(keys, scope.where)
    if leaves:
        graphdef, constructed = static_graphdef.split(module, given=given)
        found = scope.matched(graphdef, leaves)
        scope.check(dataclasses.replace(found.comparison(), missing=()))
        overlay(constructed, found)
    replaced = _write_shown(scope, module) if SHOWN.get() else set[Address]
    output = None
    donated: list[nnx.Variable[Any]] = []
    is_called = (
        bool(call.args or call.kwargs) or not scope.is_outermost or _takes_nothing(module, call)
    )
    if is_called:
        with showing(module, scope.linen) if SHOWN.get() else nullcontext():
            module, output, donated = initialized(
                module, call.function, call.args, call.kwargs, nodes
            )
        if SHOWN.get():
            unshow(module)
    else:
        _check_complete(scope, module)
    origin = Origin(constructor.look().fingerprint)
    graphdef, made = static_graphdef.split(module, origin, given)
    is_bound = graphdef.is_bound
    if donated:
        _construct_again(scope, keys, graphdef, made, donated)
    if [held for held in graphdef.look.objects if isinstance(held, Tracer)]:
        graphdef = definitions.without_tracers(
            graphdef, constructor, tuple(keys), call if is_called else None, scope.where
        )
    # An argument is not state: each call passes its own.
    arguments = {(ARRAYS, path) for path, _ in given}
    kept = arguments | replaced()
    items = zip(graphdef.slots.places, made, strict=True)
    new = scope.as_linen([(a, item) for a, item in items if a not in kept])
    if left := scope.write(new, leaves):
        _check_left(scope, left)
    if not is_bound:
        scope.store_graphdef(graphdef)
    return output, graphdef


def _write_shown(scope: WrapperScope, module: nnx.Pytree) -> Callable[[], set[Address]]:
    """Writes the state as constructed at once, for Linen's interceptors to see it.

    The returned function tells which of these leaves the interceptors have replaced since.
    """
    graphdef, constructed = static_graphdef.split(module)
    written = scope.as_linen(zip(graphdef.slots.places, constructed, strict=True))
    scope.write(written, scope.read()[0])

    def replaced() -> set[Address]:
        now = scope.matched(graphdef, scope.read()[0]).leaves
        return {a for a, leaf in written.items() if now.get(a) is not leaf}

    return replaced


def _construct_again(
    scope: WrapperScope,
    keys: Mapping[str, Any],
    graphdef: StaticGraphDef,
    made: list[Any],
    donated: list[nnx.Variable[Any]],
) -> None:
    """Takes from another module the initial values that the call has donated to a program."""
    again = scope.constructor.construct(keys, scope.where)
    new_graphdef, leaves = static_graphdef.split(again.module)
    new = dict(zip(new_graphdef.slots.places, leaves, strict=True))
    gone = set(map(id, donated))
    for i, address in enumerate(graphdef.slots.places):
        if id(made[i]) in gone:
            made[i] = new.get(address, made[i])


def _takes_nothing(module: object, call: Call) -> bool:
    """Whether a method can be called without any arguments."""
    try:
        inspect.signature(method_of(module, call.method)).bind()
    except TypeError:
        return False
    except ValueError:
        # It has no signature to be read.
        return True
    return True


def _check_complete(scope: WrapperScope, module: nnx.Module) -> None:
    """Raises if modules lack variables that only a call with inputs can create."""
    lacking = [
        ("/".join(map(str, path)), type(item.to_nnx__module).__name__)
        for path, item in nnx.iter_modules(module)
        if isinstance(item, LinenHolder) and not held_variables(item)
    ]
    if lacking:
        raise MissingInputsError(scope.where, lacking)


def _check_left(scope: WrapperScope, left: Iterable[Address]) -> None:
    """Raises for variables that a lifted transform would leave behind, as Linen does."""
    active = registry.current()
    lost = [
        (path_text(*address), "its collection among those that the transform lifts")
        for address in left
        if not issubclass(active.type_from_name(address[0]), nnx.RngState | nnx.Intermediate)
    ]
    if lost:
        remedy = (
            "Name the collection in the transform: in variable_axes, variable_broadcast or"
            " variable_carry, or in variables of nn.remat and nn.jit."
        )
        raise MismatchError(scope.where, missing=lost, remedy=remedy)
