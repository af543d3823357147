"""Checks at import what Flax and JAX promise only in their source, and replaces what is gone.

Each part has a check that runs once. Where it fails, a public way takes over with a warning; where
there is none, using the part raises one error that names it and the versions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import flax
import jax

from bridge._errors import UnsupportedFlaxError, warn

F = TypeVar("F", bound=Callable[..., Any])

_VERSIONS = f"Flax {flax.__version__} with JAX {jax.__version__}"


def part(module: str, name: str, check: Callable[[Any], Any] = bool) -> Any:
    """A part of a library, or a stand-in that raises `UnsupportedFlaxError` when it is used.

    `check` tries the part, which is unusable if this raises or returns something false.
    """
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return _Absent(f"{module}.{name}")
    problem = _problem(lambda: check(found))
    return found if problem is None else _Absent(f"{module}.{name}", problem)


def required(what: str, check: Callable[[], Any]) -> Callable[[F], F]:
    """Marks a function that needs a part of Flax for which there is no public way.

    `check` tries the part, which is unusable if this raises or returns something false. Then the
    decorator replaces the function by one that raises `UnsupportedFlaxError`.
    """
    problem = _problem(check)

    def decorated(function: F) -> F:
        absent: Any = _Absent(what, problem)
        return function if problem is None else absent

    return decorated


def holds(what: str, check: Callable[[], Any], instead: str, loses: str) -> bool:
    """Whether a part that has a public alternative is there; warns if it is not.

    `check` is as for `required`, `instead` is the public alternative, and `loses` says what that
    does not do.
    """
    problem = _problem(check)
    if problem is not None:
        warn(
            f"{_VERSIONS} does not keep {what} ({problem}); {instead} takes over, with which"
            f" {loses}"
        )
    return problem is None


def unsupported(what: str, problem: str) -> UnsupportedFlaxError:
    """The error for a part that is not as the bridge needs it, with the versions."""
    return UnsupportedFlaxError(what, problem, _VERSIONS)


def _problem(check: Callable[[], Any]) -> str | None:
    """What is wrong with a part, None if it is as it should be."""
    try:
        return None if check() else "it behaves otherwise"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Absent:
    """Stands for a part that is not there, so that importing the package does not fail for it."""

    def __init__(self, what: str, problem: str | None = None):
        self._what = what
        self._problem = problem or "it is not there"

    def _raise(self, *args: object, **kwargs: object) -> NoReturn:
        raise unsupported(self._what, self._problem)

    def __getattr__(self, name: str) -> Any:
        # Modules are searched for dunder names: by `inspect` and by test runners, for example.
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise()

    __call__ = __instancecheck__ = __subclasscheck__ = __or__ = __ror__ = _raise
