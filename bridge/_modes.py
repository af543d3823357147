"""How `train()` and `eval()` reach a wrapped Linen module.

NNX sets attributes on every module of a tree. A Linen module takes the same choices as dataclass
fields, at any depth, or as arguments of the method that is called; both are served here. An NNX
module that is wrapped inside of the Linen module has them as attributes again.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from ._flax_internals import overridden

# The attributes that nnx.Module.train and eval set.
MODE_FIELDS = ("deterministic", "use_running_average")
# What Linen modules call an argument that is true in training.
_TRAINING_ARGUMENTS = ("train", "training", "is_training")

_in_force: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("modes")


def fill_arguments(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modes: Mapping[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of a call, with the mode's arguments that the caller left out.

    Args:
      module: the Linen module; what it has as a field is set there.
      function: its unbound method.
      args: positional arguments without `self`.
      kwargs: keyword arguments.
      modes: value by name of the attributes that were set.

    Returns:
      `kwargs` and what the method has a parameter for.
    """
    if not modes:
        return kwargs
    parameters = list(_parameters(function).values())[1:]
    by_position = {
        p.name for p, _ in zip(parameters, args, strict=False) if p.kind != p.VAR_POSITIONAL
    }
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = named - by_position - kwargs.keys() - _field_names(type(module))
    choices = _choices(modes)
    return {**kwargs, **{name: choices[name] for name in missing & choices.keys()}}


@contextlib.contextmanager
def applied(modes: Mapping[str, Any]) -> Iterator[None]:
    """Modes for the Linen modules that are called in this block, and the NNX modules within."""
    if not modes:
        yield
        return
    token = _in_force.set(modes)
    try:
        with nn.intercept_methods(_interceptor(modes)):
            yield
    finally:
        _in_force.reset(token)


def set_on(module: nnx.Pytree) -> None:
    """Sets the modes in force on an NNX module that a Linen module wraps, as NNX itself does."""
    own = {name: value for name, value in _in_force.get({}).items() if name in MODE_FIELDS}
    if own and isinstance(module, nnx.Module):
        module.set_attributes(**own, raise_if_not_found=False, graph=True)


def _interceptor(modes: Mapping[str, Any]) -> Callable[..., Any]:
    """A Linen method interceptor that sets the modes as fields, wherever a module has such a field.

    An argument that the parent passes to the method still wins, as it does over an NNX attribute.
    """
    choices = _choices(modes)

    def intercept(
        next_function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        fields = choices.keys() & _field_names(type(module))
        # A field of such a name may hold something else, a submodule for instance.
        fields = {name for name in fields if isinstance(getattr(module, name), bool | None)}
        if fields:
            parameters = _parameters(getattr(type(module), context.method_name))
            passed = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
            fields = {name for name in fields if passed.get(name) is None}
        with overridden(module, {name: choices[name] for name in fields}):
            return next_function(*args, **kwargs)

    return intercept


def opens_state(modes: Mapping[str, Any]) -> bool:
    """Whether running statistics and other state are updated: after `train()`, until `eval()`."""
    return modes.get("use_running_average") is False


def _choices(modes: Mapping[str, Any]) -> dict[str, Any]:
    """The modes, and what follows from them for the arguments that Linen modules have instead."""
    for name in MODE_FIELDS:
        if name in modes:
            return {**dict.fromkeys(_TRAINING_ARGUMENTS, not modes[name]), **modes}
    return dict(modes)


@functools.lru_cache(maxsize=1024)
def _field_names(module_type: type) -> frozenset[str]:
    return frozenset(getattr(module_type, "__dataclass_fields__", ()))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
