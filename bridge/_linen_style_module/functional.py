"""`init`, `apply` and `bind`: a module run on variables that it does not hold."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import errors as flax_errors
from flax import nnx

from bridge._errors import InvalidMethodError
from bridge._flax.filters import union
from bridge._flax.linen_modules import is_call
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import set_initializing
from bridge._initialization.lazy_init import lazy_init
from bridge._linen_in_nnx import mutable_filter
from bridge._module_calls.calls import (
    MODULE_CONTEXT,
    LinenStyle,
    ModuleCall,
    ModuleInCall,
    detached_calls,
)
from bridge._module_calls.scope import as_rngs, is_in
from bridge._types import CollectionFilter, Method, Rngs

from .attributes import IS_SETUP, Setup
from .containers import mapped
from .given import install
from .guard import Guard
from .methods import is_entering
from .outermost import call_of, in_call
from .setup import set_up
from .submodules import is_lazy
from .variables import linen_variables


def cloned(module: LinenStyle, memo: dict[int, Any] | None = None, **updates: object) -> Any:
    """A module with the same fields that has no variables yet, as Linen's `clone` makes it.

    Args:
      module: a `bridge.Module`.
      memo: the clones that were made, by the id of what they are clones of.
      **updates: other values for fields.
    """
    memo = {} if memo is None else memo

    def cloned_item(suffix: str, item: object) -> Any:
        if is_lazy(item):
            return cloned(item, memo)
        if isinstance(item, nnx.Pytree):
            if id(item) not in memo:
                memo[id(item)] = nnx.clone(item)
            return memo[id(item)]
        return item

    if id(module) in memo:
        return memo[id(module)]
    with detached_calls():
        if type(module).bridge__has_own_init:
            made = nnx.clone(module)
            vars(made)[IS_SETUP] = Setup.NOT_YET
        else:
            fields = [field.name for field in dataclasses.fields(module) if field.init]
            values = {name: getattr(module, name) for name in fields}
            made = type(module)(**{n: mapped(x, cloned_item) for n, x in values.items()} | updates)
    memo[id(module)] = made
    return made


def apply_module(
    module: LinenStyle,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rngs: Rngs | int,
    method: Method,
    mutable: CollectionFilter,
    capture_intermediates: bool | Callable[[Any, str], bool] = False,
    initializing: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Runs a method of a clone: (output, variables of the mutable collections).

    Raises:
      InvalidMethodError: there is no such method.
      InvalidRngsError: `rngs` are no keys.
      InvalidFilterError: `mutable` is no filter of collections.
      ImmutableCollectionError: the call has changed a collection that it may not update.
    """
    where = f"a call of {type(module).__name__}"
    mutable_filter.checked(mutable, where)
    if capture_intermediates:
        mutable = union(mutable, ["intermediates"])
    clone = cloned(module)
    install(clone, variables)
    if initializing:
        set_initializing(nodes_below(clone).objects, True)
    capture = is_call if capture_intermediates is True else capture_intermediates or None
    call = ModuleCall(clone, as_rngs(rngs, where), mutable, capture, is_kept=False)
    guard = Guard(call.root)
    output = in_call(call, lambda record: _called(record, method, args, kwargs))
    if initializing:
        set_initializing(nodes_below(clone).objects, False)
    guard.check()
    if mutable is False:
        return output, {}
    return output, {c: x for c, x in linen_variables(clone).items() if is_in(mutable, c)}


def bound(
    module: LinenStyle, variables: Mapping[str, Any], rngs: Rngs | int, mutable: CollectionFilter
) -> Any:
    """A clone that holds variables and keys."""
    where = f"{type(module).__name__}.bind"
    clone = cloned(module)
    install(clone, variables)
    if rngs is not None:
        clone.bridge__rngs = as_rngs(rngs, where)
    if mutable is not True:
        clone.bridge__mutable = mutable_filter.checked(mutable, where)
    in_call(call_of(clone), _set_up_all)
    return clone


def initialized_clone(
    module: LinenStyle,
    rngs: Rngs | int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str | None,
) -> Any:
    """A clone that has the variables which a method creates."""
    clone = cloned(module)
    clone.bridge__rngs = as_rngs(rngs, f"{type(module).__name__}.lazy_init")
    lazy_init(clone if method in (None, "__call__") else getattr(clone, method), *args, **kwargs)
    return clone


def _set_up_all(record: ModuleInCall) -> None:
    """Runs `setup` of a module and of those below it, whose submodules can be asked for then."""
    set_up(record)
    for value in list(vars(record.module).values()):
        below = record.call.find(value)
        if below is not None and below.is_owned:
            _set_up_all(below)


def _called(
    record: ModuleInCall, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = record.module
    set_up(record)
    MODULE_CONTEXT.module_stack.append(record)
    try:
        return _function(module, method)(*args, **kwargs)
    finally:
        MODULE_CONTEXT.module_stack.pop()


def _function(module: LinenStyle, method: Method) -> Callable[..., Any]:
    """The method of this module that a name, a function or a method of another one means."""
    method = "__call__" if method is None else method
    if isinstance(method, str):
        found = getattr(module, method, None)
        if not callable(found):
            names = [n for n, x in inspect.getmembers(type(module)) if is_entering(x)]
            raise InvalidMethodError(type(module), method, names)
        return found
    function = method
    if inspect.ismethod(method) and isinstance(method.__self__, nnx.Module):
        function = method.__func__
    if not callable(function) or not inspect.signature(function).parameters:
        raise flax_errors.ApplyModuleInvalidMethodError(function)
    return lambda *args, **kwargs: function(module, *args, **kwargs)
