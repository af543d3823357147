"""Calls a `bridge.Module`: what enters it, and what goes on around each of its methods."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

from bridge._conversion.linen_attributes import LinenStyle
from bridge._errors import (
    InvalidModuleError,
    MismatchError,
    MissingRngError,
    NotInitializedError,
    UnboundLinenError,
)
from bridge._flax.linen_modules import detached, innermost_linen
from bridge._flax.objects import attributes_of
from bridge._module_calls import (
    MODULE_CONTEXT,
    ModuleCall,
    ModuleInCall,
    innermost,
    joined,
    joined_record,
    mutable_around,
)

from .attributes import IS_SETUP
from .submodules import adopt_fields, settle

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
      InvalidModuleError: later, if the method is called on another kind of module.

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


def is_entering(value: object) -> bool:
    """Whether a member of a class is a method of the model."""
    return hasattr(value, _ENTERS)


def _entering(method: Callable[..., Any], *, is_compact: bool) -> Any:
    @functools.wraps(method)
    def enter(self: object, *args: object, **kwargs: object) -> Any:
        if not isinstance(self, LinenStyle):
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


def call_of(module: LinenStyle) -> ModuleCall:
    """A call of a module that keeps its variables; it may update all, unless somebody said."""
    mutable = mutable_around()
    mutable = attributes_of(module).get("bridge__mutable") if mutable is None else mutable
    return ModuleCall(module, mutable=mutable)


@contextlib.contextmanager
def in_call(call: ModuleCall) -> Iterator[ModuleInCall]:
    """Runs a block in a call of an outermost module, and leaves the module without scopes."""
    adopt_fields(call.root)
    try:
        with detached(), _capturing(call.capture), innermost(call.root):
            yield call.root
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
        with in_call(call_of(module)) as record:
            return _run_in(record, method, args, kwargs, is_compact)
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
    except UnboundLinenError:
        raise
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
    record = joined_record(module)
    if record is None:
        with in_call(call_of(module)):
            return made_by_setup(module)
    set_up(record, again=True)
    return record.made


def _unbound_linen(error: Exception) -> nn.Module | None:
    """The Linen module that was called without variables and raised an error for it."""
    if isinstance(error, AttributeError):
        # What its `setup` would make is not there.
        found = error.obj
    else:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        owners = (frame.f_locals.get("self") for frame in frames)
        found = next((owner for owner in owners if isinstance(owner, nn.Module)), None)
    return found if isinstance(found, nn.Module) and found.scope is None else None
