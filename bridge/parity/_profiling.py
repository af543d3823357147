"""Python's profiling hook for a while, in place of whatever hook is there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hooked(hook: Any) -> Iterator[None]:
    """A block in which a hook is called, in this thread.

    Args:
      hook: a function as `sys.setprofile` takes it, or what `sys.getprofile` gave.
    """
    before = sys.getprofile()
    _set(hook)
    try:
        yield
    finally:
        _set(before)


def _set(hook: Any) -> None:
    if hook is None or callable(hook):
        sys.setprofile(hook)
    else:
        # A profiler in C, such as cProfile's, stands there for itself.
        hook.enable()
