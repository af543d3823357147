"""A call of an outermost module, which all that is called in it joins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx

from bridge._flax.linen_modules import detached
from bridge._flax.objects import attributes_of
from bridge._module_calls.calls import (
    LinenStyle,
    ModuleCall,
    ModuleInCall,
    mutable_around,
    own_rngs,
)

from .submodules import adopt_fields

T = TypeVar("T")


def call_of(module: LinenStyle) -> ModuleCall:
    """A call of a module that keeps its variables; it may update all, unless somebody said."""
    mutable = mutable_around()
    mutable = attributes_of(module).get("bridge__mutable") if mutable is None else mutable
    return ModuleCall(module, own_rngs(module) or nnx.Rngs(), mutable)


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
