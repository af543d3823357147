"""Creates the variables of a ToLinen: its module as constructed, and what a call creates."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
from flax import nnx

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder, held_variables
from bridge._conversion.neutral import Address
from bridge._errors import MismatchError, MissingInputsError, path_text
from bridge._flax.linen_modules import is_bound
from bridge._flax.traces import trace_of
from bridge._flax.variables import leaf_value
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import StaticGraphDef
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

    Args:
      scope: the wrapper in its scope.
      leaves: the leaves of the variables that are there, which stay as they are.
      call: the call at hand.

    Returns:
      (the call's output, the definition).
    """
    scope.store_graphdef(None)
    constructor = scope.constructor
    keys = scope.constructor_keys()
    module, nodes, given = constructor.construct(keys, scope.where)
    if leaves:
        graphdef, constructed = static_graphdef.split(module)
        found = scope.matched(static_graphdef.with_given(graphdef, given), leaves)
        scope.check(dataclasses.replace(found.comparison(), missing=()))
        overlay(constructed, found)
    replaced = _write_shown(scope, module) if SHOWN.get() else set
    output = None
    is_called = not scope.is_outermost or _takes(method_of(module, call.method), call)
    if is_called:
        with showing(module, scope.linen) if SHOWN.get() else nullcontext():
            module, output = initialized(module, call.function, call.args, call.kwargs, nodes)
        if SHOWN.get():
            unshow(module)
    else:
        _check_complete(scope, module)
    graphdef, made = static_graphdef.split(module, constructor.origin, given)
    _replace_donated(scope, keys, graphdef, made)
    graphdef = definitions.without_tracers(
        graphdef, constructor, tuple(keys), call if is_called else None, scope.where
    )
    # An argument is not state: each call passes its own.
    arguments = {(ARRAYS, path) for path, _ in given}
    new = {a: x for a, x in scope.as_linen(graphdef, made).items() if a not in arguments}
    _check_kept(scope, new, leaves)
    kept = replaced()
    scope.write({a: x for a, x in new.items() if a not in kept}, leaves)
    # A bound Linen module has the variables of this `init`, and every call has its own.
    if not any(is_bound(item) for item in constructor.look().objects):
        scope.store_graphdef(graphdef)
    return output, graphdef


def _write_shown(scope: WrapperScope, module: Any) -> Callable[[], set[Address]]:
    """Writes the state as constructed at once, for Linen's interceptors to see it.

    Returns:
      What tells which of these leaves have been replaced since, by the interceptors.
    """
    graphdef, constructed = static_graphdef.split(module)
    written = scope.as_linen(graphdef, constructed)
    scope.write(written, scope.read()[0])

    def replaced() -> set[Address]:
        now = scope.matched(graphdef, scope.read()[0]).leaves
        return {a for a, leaf in written.items() if now.get(a) is not leaf}

    return replaced


def _replace_donated(
    scope: WrapperScope, keys: Mapping[str, Any], graphdef: StaticGraphDef, made: list[Any]
) -> None:
    """Constructs once more for values that are gone: the call has donated them to a program."""
    donated = [i for i, leaf in enumerate(made) if _is_gone(leaf_value(leaf))]
    if not donated:
        return
    again = scope.constructor.construct(keys, scope.where)
    new_graphdef, leaves = static_graphdef.split(again.module)
    new = {slot.address: leaf for slot, leaf in zip(new_graphdef.slots, leaves, strict=True)}
    for i in donated:
        made[i] = new.get(graphdef.slots[i].address, made[i])


def _is_gone(value: Any) -> bool:
    arrays = (value,) if isinstance(value, jax.Array) else jax.tree.leaves(value)
    # Neither a tracer nor a reference tells.
    concrete = [x for x in arrays if isinstance(x, jax.Array) and trace_of(x) is None]
    return any(not isinstance(x, jax.Ref) and x.is_deleted() for x in concrete)


def _takes(function: Any, call: Call) -> bool:
    """False for a call without any arguments of a method that needs some."""
    if call.args or call.kwargs:
        return True
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:
        # It has no signature to be read.
        return True
    return True


def _check_complete(scope: WrapperScope, module: Any) -> None:
    """Raises if modules lack variables that only a call with inputs can create."""
    lacking = [
        ("/".join(map(str, path)), type(item.to_nnx__module).__name__)
        for path, item in nnx.iter_modules(module)
        if isinstance(item, LinenHolder) and not held_variables(item)
    ]
    if lacking:
        raise MissingInputsError(scope.where, lacking)


def _check_kept(
    scope: WrapperScope, made: Mapping[Address, Any], found: Mapping[Address, Any]
) -> None:
    """Raises for variables that a lifted transform would leave behind, as Linen does."""
    is_mutable = functools.cache(scope.linen.is_mutable_collection)
    active = registry.current()
    lost = [
        (path_text(*address), "its collection among those that the transform lifts")
        for address in made
        if not is_mutable(address[0])
        and address not in found
        and not issubclass(active.type_from_name(address[0]), nnx.RngState | nnx.Intermediate)
    ]
    if lost:
        raise MismatchError(scope.where, missing=lost)
