"""What `model.encoder` is on a ToNNX: a mapping of Variables that can be called."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ._errors import InvalidMethodError


class Submodule(collections.UserDict[Any, Any]):
    """The variables of a Linen submodule in a ToNNX, by name; a view, so writes reach the model.

    A submodule that was made in `setup`, or is a field of the Linen module, can be called, and so
    can its methods: `model.encoder(x)`, `model.encoder.attend(x)`.

    Args:
      owner: the ToNNX.
      path: where the submodule is in it.
      variables: the dict that the ToNNX holds there.
    """

    def __init__(self, owner: Callable[..., Any], path: tuple[str, ...], variables: dict[Any, Any]):
        # UserDict would copy.
        self.data = variables
        self._owner = owner
        self._path = path

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        return Submodule(self._owner, (*self._path, key), value) if type(value) is dict else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner(*args, method=_method_at(self._path), **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._owner, method=_method_at((*self._path, name)))


def _method_at(path: tuple[str, ...]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = module
        for name in path:
            if not hasattr(found, name):
                raise InvalidMethodError(
                    type(module),
                    ".".join(path),
                    [n for n in vars(type(found)) if not n.startswith("_")],
                )
            found = getattr(found, name)
        return found(*args, **kwargs)

    return call


def _flatten(submodule: Submodule) -> tuple[Any, tuple[Any, ...]]:
    keys = tuple(sorted(submodule.data))
    return [(jax.tree_util.DictKey(key), submodule.data[key]) for key in keys], keys


def _unflatten(keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
    # A mapped tree belongs to no model, so it is a plain dict.
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_with_keys(Submodule, _flatten, _unflatten)
