"""Tracers whose missing `sharding` is told in a short message, in the thread that asks for it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from jax.core import Tracer

_is_short: contextvars.ContextVar[bool] = contextvars.ContextVar("is_short", default=False)
_own = vars(Tracer)["sharding"]


@contextlib.contextmanager
def short_sharding_errors() -> Iterator[None]:
    """Lets `tracer.sharding` raise without a list of equations, in this block and thread.

    In jax 0.10.2 the message of that AttributeError walks through the whole trace, and flax 0.12.8
    asks for the attribute at each key that a stream gives: the time grows with the square of the
    model, to a minute for 200 blocks. Nobody sees the message, as `Tracer.__getattr__` raises an
    error of its own after it. No option of JAX turns the list off, and the streams belong to the
    program. So the property is replaced while any thread is in such a block; it asks for its
    context, and gives all others JAX's own message.
    """
    token = _is_short.set(True)
    _installation.begin()
    try:
        yield
    finally:
        _installation.end()
        _is_short.reset(token)


def _sharding(tracer: Any) -> Any:
    if _is_short.get():
        raise AttributeError(f"a tracer of {type(tracer).__name__} has no sharding")
    return _own.fget(tracer)


class _Installation:
    """Replaces the property for the first block that needs it, until the last one ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0

    def begin(self) -> None:
        with self._lock:
            if self._blocks == 0:
                setattr(Tracer, "sharding", property(_sharding))  # noqa: B010
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                setattr(Tracer, "sharding", _own)  # noqa: B010


_installation = _Installation()
