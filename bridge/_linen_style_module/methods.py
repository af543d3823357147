"""What happens around a method of a `bridge.Module`: `setup`, names, scopes, captured outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

from bridge._errors import (
    InvalidModuleError,
    MismatchError,
    MissingRngError,
    NotInitializedError,
    UnboundLinenError,
)
from bridge._flax.linen_modules import detached, innermost_linen
from bridge._flax.objects import attributes_of, is_initializing
from bridge._module_calls.calls import (
    MODULE_CONTEXT,
    ModuleCall,
    ModuleInCall,
    joined,
    mutable_around,
    own_rngs,
)

from .attributes import IS_SETUP
from .derived import find_derived
from .guard import Guard
from .submodules import adopt_fields, is_lazy, settle
from .ties import tie_attributes

F = TypeVar("F", bound=Callable[..., Any])

# Marks a function that enters the module by itself.
_ENTERS = "bridge__enters"


def compact(method: F) -> F:
    """Lets a method declare submodules and variables where it uses them, as `nn.compact` does.

    Args:
      method: a method of a `bridge.Module`; `nn.compact` on it has the same meaning.

    Returns:
      The method.

    Raises:
      InvalidModuleError: later, if it is called with another kind of module.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> import bridge
      >>> class Scale(bridge.Module):
      ...     @bridge.compact
      ...     def __call__(self, x):
      ...         return x * self.param('scale', jax.nn.initializers.ones, x.shape[-1:])
      >>> Scale().init(0, jnp.ones((1, 2)))['params']['scale'].shape
      (2,)

    Source: flax/nnx/bridge/module.py:compact @ 0.12.8
    """
    return _entering(method, is_compact=True)


def with_entries(cls: type) -> None:
    """Makes the methods that a class defines enter the module, but for those with `nn.nowrap`."""
    for name, value in list(vars(cls).items()):
        is_special = name.startswith("__") and name != "__call__"
        # A function may be the default of a field.
        is_field = name in inspect.get_annotations(cls)
        if is_special or is_field or name == "setup" or not inspect.isfunction(value):
            continue
        if not is_entering(value) and not getattr(value, "nowrap", False):
            entering = _entering(value, is_compact=hasattr(value, "compact"))
            type.__setattr__(cls, name, entering)


def is_entering(value: Any) -> bool:
    """Whether a member of a class is a method of the model."""
    return hasattr(value, _ENTERS)


def _entering(method: Any, *, is_compact: bool) -> Any:
    @functools.wraps(method)
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_lazy(self):
            raise InvalidModuleError(
                f"the method {method.__name__}",
                self,
                "a bridge.Module",
                "use flax.linen.compact in a Linen class",
            )
        return run(self, method, args, kwargs, is_compact=is_compact)

    setattr(enter, _ENTERS, True)
    enter.compact = is_compact  # pyright: ignore[reportAttributeAccessIssue]
    return enter


def run(
    module: Any,
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
        if record.is_owned or record.call.is_kept:
            return _run_in(record, method, args, kwargs, is_compact)
        # A transform's copy, whose values are compared in the transform.
        guard = Guard(record)
        output = _run_in(record, method, args, kwargs, is_compact)
        guard.check()
        return output
    try:
        return in_call(
            ModuleCall(module, own_rngs(module) or nnx.Rngs(), _mutable(module)),
            lambda record: _run_in(record, method, args, kwargs, is_compact),
        )
    except (MismatchError, MissingRngError, NotInitializedError) as error:
        owner = innermost_linen()
        if owner is None or nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState))):
            raise
        raise NotInitializedError.of_class_in_linen(type(module), type(owner)) from error


def in_call(call: ModuleCall, function: Callable[[ModuleInCall], Any]) -> Any:
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

    def captured(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = method(*args, **kwargs)
        if capture(context.module, context.method_name):
            context.module.sow("intermediates", context.method_name, output)
        return output

    return nn.intercept_methods(captured)


def ensure_setup(module: Any) -> None:
    """Runs `setup`, if it has not been run."""
    if attributes_of(module)[IS_SETUP]:
        return
    above = joined()
    record = above and above.call.find(module)
    if record:
        set_up(record)
    elif above is None:
        in_call(ModuleCall(module, own_rngs(module) or nnx.Rngs(), _mutable(module)), set_up)


def set_up(record: ModuleInCall) -> None:
    """Runs `setup` of a module that is part of a call, once for as long as the module lives."""
    own = attributes_of(record.module)
    if own[IS_SETUP] or record.in_setup:
        return
    record.in_setup = True
    MODULE_CONTEXT.module_stack.append(record)
    try:
        type(record.module).setup(record.module)
        tie_attributes(record)
        own[IS_SETUP] = True
    finally:
        MODULE_CONTEXT.module_stack.pop()
        record.in_setup = False
        record.type_counter.clear()
    if record.call.is_kept:
        find_derived(record, _set_up_alone)


def _set_up_alone(module: Any) -> None:
    in_call(ModuleCall(module, own_rngs(module) or nnx.Rngs(), is_kept=False), set_up)


def _run_in(
    record: ModuleInCall,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_compact: bool,
) -> Any:
    module = record.module
    if not attributes_of(module)[IS_SETUP]:
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
                settle(record)


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


def _mutable(module: Any) -> Any:
    """What a call of an outermost module may update; all that there is, unless somebody said."""
    mutable = mutable_around()
    return attributes_of(module).get("bridge__mutable") if mutable is None else mutable


def is_creating(record: ModuleInCall, collection: str) -> bool:
    """Whether a variable may be created now."""
    if is_initializing(record.module):
        return True
    return record.call.mutable is not None and record.scope.is_mutable_collection(collection)
