"""Lowers many programs in one MLIR context, which halves the time of lowering a small one.

JAX makes a context for each program that it lowers, and loads all dialects into it: 4 ms, where
lowering the program itself takes 3. The suite lowers tens of thousands of programs.
"""

import functools
import threading
from importlib.metadata import version

# A context keeps every constant that was in one of its programs.
PROGRAMS = 500


class _OfThread(threading.local):
    context = None
    programs = 0


def share() -> None:
    """Makes JAX lower this many programs of a thread in one context.

    This replaces a function without a public name, so only in the releases that were tried.
    """
    if not version("jax").startswith("0.10."):
        return
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    own = _OfThread()

    @functools.wraps(make)
    def shared():
        if own.programs % PROGRAMS == 0:
            own.context = make()
        own.programs += 1
        return own.context

    mlir.make_ir_context = shared
