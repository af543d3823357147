"""Calls a `bridge.Module`: `setup`, names, scopes and captured outputs around its methods."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

from bridge._errors import MismatchError, MissingRngError, NotInitializedError, UnboundLinenError
from bridge._flax.linen_modules import detached, innermost_linen
from bridge._flax.objects import attributes_of
from bridge._module_calls.calls import (
    MODULE_CONTEXT,
    LinenStyle,
    ModuleCall,
    ModuleInCall,
    innermost,
    joined,
    joined_record,
    mutable_around,
)

from .attributes import IS_SETUP
from .submodules import adopt_fields, settle

T = TypeVar("T")


def call_of(module: LinenStyle) -> ModuleCall:
    """A call of a module that keeps its variables; it may update all, unless somebody said."""
    mutable = mutable_around()
    mutable = attributes_of(module).get("bridge__mutable") if mutable is None else mutable
    return ModuleCall(module, mutable=mutable)


def in_call(call: ModuleCall, function: Callable[[ModuleInCall], T]) -> T:
    """Runs a function in a call of an outermost module, and leaves the module without scopes."""
    adopt_fields(call.root)
    try:
        with detached(), _capturing(call.capture):
            return function(call.root)
    finally:
        call.close()


def _capturing(
    capture: Callable[[Any, str], bool] | None,
) -> contextlib.AbstractContextManager[None]:
    """Lets the Linen modules in this block sow the outputs that the call captures."""
    if capture is None:
        return contextlib.nullcontext()

    def captured(
        method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        output = method(*args, **kwargs)
        if capture(context.module, context.method_name):
            context.module.sow("intermediates", context.method_name, output)
        return output

    return nn.intercept_methods(captured)


def run(
    module: LinenStyle,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_compact: bool = False,
) -> Any:
    """Calls a method of a module, in the call that runs or in one of its own."""
    above = joined()
    if above is not None:
        record = above.call.find(module)
        if record is None:
            record = above.call.attach(module, above)
            adopt_fields(record)
        return _run_in(record, method, args, kwargs, is_compact)
    try:
        return in_call(
            call_of(module), lambda record: _run_in(record, method, args, kwargs, is_compact)
        )
    except (MismatchError, MissingRngError, NotInitializedError) as error:
        owner = innermost_linen()
        if owner is None or nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState))):
            raise
        name = type(module).__name__
        remedy = f"make it a submodule of {type(owner).__name__} with bridge.to_linen({name}, …)"
        raise NotInitializedError(name, remedy) from error


def _run_in(
    record: ModuleInCall,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_compact: bool,
) -> Any:
    module = record.module
    set_up(record)
    stack = MODULE_CONTEXT.module_stack
    record.compact_depth += is_compact
    stack.append(record)
    name = method.__name__
    title = record.path[-1] if record.path else type(module).__name__
    try:
        with jax.named_scope(title if name == "__call__" else f"{title}.{name}"):
            output = method(module, *args, **kwargs)
        if record.call.capture is not None and record.call.capture(module, name):
            # A submodule may be called `sow`, and a field `setup`.
            type(module).sow(module, "intermediates", name, output)
        return output
    except (flax_errors.CallCompactUnboundModuleError, AttributeError) as error:
        called = _unbound_linen(error)
        if called is None:
            raise
        raise UnboundLinenError(type(called).__name__, type(module).__name__) from error
    finally:
        stack.pop()
        if is_compact:
            record.compact_depth -= 1
            record.reserved.clear()
            if not record.compact_depth:
                record.type_counter.clear()
        if record.views and not record.compact_depth:
            settle(record.views)


def set_up(record: ModuleInCall, *, again: bool = False) -> None:
    """Runs `setup` of a module that is part of a call, unless it has run.

    It runs once in the module's life. `again` says that what it makes for one call is needed.
    """
    own = attributes_of(record.module)
    if record.in_setup or record.is_set_up or (own[IS_SETUP] and not again):
        return
    record.in_setup = True
    try:
        with innermost(record):
            type(record.module).setup(record.module)
        own[IS_SETUP] = record.is_set_up = True
    finally:
        record.in_setup = False
        record.type_counter.clear()


def made_by_setup(module: LinenStyle) -> dict[str, Any]:
    """Runs `setup` in the call that runs, or in one of its own: what belongs to the call."""

    def made(record: ModuleInCall) -> dict[str, Any]:
        set_up(record, again=True)
        return record.made

    record = joined_record(module)
    return in_call(call_of(module), made) if record is None else made(record)


def _unbound_linen(error: Exception) -> nn.Module | None:
    """The Linen module that was called without variables and raised an error for it."""
    if isinstance(error, UnboundLinenError):
        return None
    if isinstance(error, AttributeError):
        # What its `setup` would make is not there.
        found = error.obj
    else:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        owners = (frame.f_locals.get("self") for frame in frames)
        found = next((owner for owner in owners if isinstance(owner, nn.Module)), None)
    return found if isinstance(found, nn.Module) and found.scope is None else None
