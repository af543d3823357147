"""Defines `model.encode` and `model.encoder` on a ToLinen."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from bridge._errors import LostUpdateError, write_to_copy_text
from bridge._flax.nodes import nodes_below
from bridge._flax.variables import add_set_hook

from .bound_module import BoundModule
from .constructor import class_of
from .creation import found_without
from .matched_variables import MatchedVariables
from .scope import WrapperScope


class NNXSubmodule:
    """A submodule of a bound NNX module: calls go through the wrapper, so that updates are kept.

    `path` has attribute names and indices; `module` is the submodule itself, for reading.
    """

    __slots__ = ("_module", "_owner", "_path")

    def __init__(self, owner: Any, path: tuple[Any, ...], module: nnx.Module):
        self._owner = owner
        self._path = path
        self._module = module

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return self._owner.run_nnx_method(_method_at(self._path), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return through_wrapper(self._owner, (*self._path, name), getattr(self._module, name))

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__slots__:
            place = f"{name!r} of {'.'.join(map(str, self._path))}"
            raise LostUpdateError(write_to_copy_text(repr(self._owner.nnx_class), place))
        super().__setattr__(name, value)

    def __getitem__(self, key: object) -> Any:
        return through_wrapper(self._owner, (*self._path, key), self._module[key])  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[key] for key in range(len(self)))

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{'.'.join(map(str, self._path))}: {self._module!r}"


def through_wrapper(owner: Any, path: tuple[Any, ...], value: object) -> Any:
    """An attribute of a bound NNX module, so that calling it goes through the wrapper."""
    if isinstance(value, nnx.Module):
        return NNXSubmodule(owner, path, value)
    if isinstance(value, types.MethodType):
        return functools.partial(owner.run_nnx_method, _method_at(path))
    return value


MISSING = object()


def nnx_attribute(scope: WrapperScope, name: str) -> Any:
    """What the NNX module of a ToLinen answers to a name, `MISSING` if it has none."""
    linen = scope.linen
    cls = class_of(linen.nnx_class)
    if callable(getattr(cls, name, None)):
        # Linen's `apply(method=…)` takes a bound method apart and calls its function on a copy.
        return types.MethodType(linen_method(name), linen)
    if linen.scope is not None:
        leaves, graphdef = scope.read()
        found = scope.matched(graphdef, leaves) if graphdef else found_without(scope, leaves)
        if found.comparison().fits:
            return _of_variables(scope, found, name)
    if inspect.getattr_static(cls, name, None) is None:
        return MISSING
    # A property may need no variables.
    found = found_without(scope, {})
    module = found.graphdef.blueprint.build(found.avals).module
    try:
        value = getattr(module, name, MISSING)
    except Exception:
        # It computes with values, and only shapes are known.
        return MISSING
    held = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Variable))
    is_abstract = any(isinstance(x, nnx.Pytree | nnx.Variable | jax.ShapeDtypeStruct) for x in held)
    return MISSING if is_abstract else value


def _of_variables(scope: WrapperScope, found: MatchedVariables, name: str) -> Any:
    """An attribute of the module made of the variables that there are."""
    module = BoundModule(found).module
    value = getattr(module, name, MISSING)
    refuse = functools.partial(_refuse_write, scope.where)
    for variable in nodes_below(module).variables:
        add_set_hook(variable, refuse)
    return through_wrapper(scope.linen, (name,), value)


def _refuse_write(where: str, variable: nnx.Variable[Any], value: object) -> Any:
    """Raises on a write into what was read, because its module is only a copy of the variables.

    A set hook does not learn which items are written, so it cannot pass the write on.
    """
    raise LostUpdateError(write_to_copy_text(where, variable.var_type.__name__))


def linen_method(name: str) -> Callable[..., Any]:
    """A Linen method that calls the NNX module's method of the same name."""

    def call(self: Any, /, *args: object, **kwargs: object) -> Any:
        return self.run_nnx_method(name, *args, **kwargs)

    call.__name__ = name
    return call


def _method_at(path: tuple[Any, ...]) -> Callable[..., Any]:
    def call(module: Any, /, *args: object, **kwargs: object) -> Any:
        found = module
        for key in path:
            found = getattr(found, key) if isinstance(key, str) else found[key]
        return found(*args, **kwargs)

    return call
