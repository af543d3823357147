"""Which RNG stream a constructor asks for that is not there."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flax import nnx

_misses: ContextVar[list[tuple[Exception, str]] | None] = ContextVar("misses", default=None)


class _ObservedRngs(nnx.Rngs):
    """An `nnx.Rngs` that notes which streams it was asked for in vain."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            _note(error, name)
            raise

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError as error:
            _note(error, name)
            raise


def _note(error: Exception, name: str) -> None:
    misses = _misses.get()
    if misses is not None:
        misses.append((error, name))


def missing_stream(construct: Callable[[type[nnx.Rngs]], Any]) -> str | None:
    """The stream for want of which a constructor fails, None if it fails for something else.

    The constructor runs again, with an `nnx.Rngs` that says what is asked of it: Flax's error has
    the name in its text alone. Only a constructor that has failed is run again, since the type of
    the `nnx.Rngs` becomes part of a module that keeps it.

    Args:
      construct: makes the module, with streams of this type.
    """
    misses: list[tuple[Exception, str]] = []
    token = _misses.set(misses)
    try:
        construct(_ObservedRngs)
    except (AttributeError, KeyError) as error:
        # A constructor may ask for a stream and go on without it.
        return next((name for miss, name in misses if miss is error), None)
    finally:
        _misses.reset(token)
    return None
