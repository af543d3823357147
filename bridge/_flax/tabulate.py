"""Shows a wrapper, and what it makes inside a call, in `nnx.tabulate`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import nnx

F = TypeVar("F", bound=Callable[..., Any])

_TABULATE_ID = "_nnx_tabulate_id"


class _Uncounted:
    """A method that is not a function, so that `nnx.tabulate` does not count its calls."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self._function, owner)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._function(*args, **kwargs)


def uncounted(function: F) -> F:
    """Marks a method that is not part of the model; `nnx.tabulate` takes every public function."""
    found: Any = _Uncounted(function)
    return found


def mark_tabulated(nodes: Sequence[nnx.Pytree], around: nnx.Pytree | None) -> None:
    """Makes objects count as the node that created them, if `nnx.tabulate` is running.

    `nnx.tabulate` patches the methods of every class in a model. The patched methods look for an id
    that it put on the objects it found, and objects that a wrapped module makes during its call
    have none.
    """
    own = None if around is None else vars(around).get(_TABULATE_ID)
    for node in nodes if own is not None else ():
        object.__setattr__(node, _TABULATE_ID, own)
