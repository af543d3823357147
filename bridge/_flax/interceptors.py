"""Interceptors of Linen methods, and calls that pass every keyword through them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flax import linen as nn

# What an interceptor is told: `module`, `method_name`, `orig_method`. The class has no public name.
InterceptorContext: TypeAlias = Any


class _Packed(NamedTuple):
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


_unpacks: contextvars.ContextVar[bool] = contextvars.ContextVar("unpacks", default=False)


@contextlib.contextmanager
def intercepting(interceptor: Callable[..., Any]) -> Iterator[None]:
    """`nn.intercept_methods`, in which `call_method` passes every keyword on."""

    def intercept(next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if args and type(args[0]) is _Packed:
            args, kwargs = args[0]
        return interceptor(next_function, args, kwargs, context)

    token = _unpacks.set(True)
    try:
        with nn.intercept_methods(intercept):
            yield
    finally:
        _unpacks.reset(token)


def call_method(
    function: Callable[..., Any], bound: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls an unbound method, or another function, on a bound Linen module.

    While there are interceptors, Flax 0.12.8 passes the arguments of a method through a function
    whose own are called `orig_method` and `module`, so keywords of these names are hidden from it.
    """
    is_method = getattr(function, "method_handler_wrapped", False)
    if is_method and _unpacks.get() and kwargs.keys() & {"orig_method", "module"}:
        args, kwargs = (_Packed(args, kwargs),), {}
    return function(bound, *args, **kwargs)
