"""How a wrapper and what it makes inside of a call show in `nnx.tabulate`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from flax import nnx

F = TypeVar("F", bound=Callable[..., Any])

_TABULATE_ID = "_nnx_tabulate_id"


class _Uncounted:
    """A method that is no function, so that `nnx.tabulate` does not count its calls."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self._function, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def uncounted(function: F) -> F:
    """Marks a method that is no part of the model; `nnx.tabulate` takes every public function."""
    found: Any = _Uncounted(function)
    return found


class _NewTabulateId(int):
    """An id that `nnx.tabulate` has just put on an object, whose Variables it asks for next."""


def as_tabulated(name: str, value: Any) -> Any:
    """An attribute's value, marked if it is what `nnx.tabulate` 0.12.8 sets on an object.

    It shows names and shapes for the Variables that an object itself has, and only counts for those
    in a dict of it; a native model has an object for each dict that a ToNNX has. Nothing in its
    interface says how an object is to be shown.
    """
    return _NewTabulateId(value) if name == _TABULATE_ID else value


def unmark_tabulated(node: nnx.Pytree) -> bool:
    """Whether `as_tabulated` has marked an object's id; it is a plain id afterwards."""
    value = vars(node).get(_TABULATE_ID)
    is_marked = type(value) is _NewTabulateId
    if is_marked:
        object.__setattr__(node, _TABULATE_ID, int(value))
    return is_marked


def without_dicts(attributes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Attributes with the items of dicts in the place of the dicts, for this one look at them."""
    for name, value in attributes:
        if type(value) is dict:
            yield from without_dicts((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value


def mark_tabulated(nodes: Sequence[nnx.Pytree], around: nnx.Pytree | None) -> None:
    """Makes objects count as the node that they are made inside of, if `nnx.tabulate` runs.

    It patches the methods of every class in a model, and the patched ones look for an id that it
    put on the objects it found; those that a wrapped module makes while it is called have none.
    """
    own = None if around is None else vars(around).get(_TABULATE_ID)
    for node in nodes if own is not None else ():
        object.__setattr__(node, _TABULATE_ID, own)
