"""How `train()` and `eval()` reach a wrapped Linen module.

NNX sets attributes on every module of a tree. A Linen module takes the same choices as dataclass
fields, at any depth, or as arguments of the method that is called; both are served here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn

from ._flax_internals import overridden

# The attributes that nnx.Module.train and eval set.
MODE_FIELDS = ("deterministic", "use_running_average")
# What Linen modules call an argument that is true in training.
_TRAINING_ARGUMENTS = ("train", "training", "is_training")


def fill_arguments(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modes: Mapping[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of a call, with the mode's arguments that the caller left out.

    Args:
      function: the unbound Linen method.
      args: positional arguments without `self`.
      kwargs: keyword arguments.
      modes: value by name of the attributes that were set.

    Returns:
      `kwargs` and what the method has a parameter for.
    """
    if not modes:
        return kwargs
    wanted = dict(modes)
    is_training = _is_training(modes)
    if is_training is not None:
        wanted.update(dict.fromkeys(_TRAINING_ARGUMENTS, is_training))
    parameters = list(_parameters(function).values())[1:]
    by_position = {
        p.name for p, _ in zip(parameters, args, strict=False) if p.kind != p.VAR_POSITIONAL
    }
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = named - by_position - kwargs.keys()
    return {**kwargs, **{name: value for name, value in wanted.items() if name in missing}}


def interceptor(modes: Mapping[str, Any]) -> Callable[..., Any]:
    """A Linen method interceptor that sets the modes as fields, wherever a module has such a field.

    An argument that the parent passes to the method still wins, as it does over an NNX attribute.
    """

    def intercept(
        next_function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        own = {name: value for name, value in modes.items() if name in _field_names(type(module))}
        if own:
            parameters = _parameters(getattr(type(module), context.method_name))
            passed = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
            own = {name: value for name, value in own.items() if passed.get(name) is None}
        with overridden(module, own):
            return next_function(*args, **kwargs)

    return intercept


def opens_state(modes: Mapping[str, Any]) -> bool:
    """Whether running statistics and other state are updated: after `train()`, until `eval()`."""
    return modes.get("use_running_average") is False


def _is_training(modes: Mapping[str, Any]) -> bool | None:
    for name in MODE_FIELDS:
        if name in modes:
            return not modes[name]
    return None


@functools.lru_cache(maxsize=1024)
def _field_names(module_type: type) -> frozenset[str]:
    return frozenset(getattr(module_type, "__dataclass_fields__", ()))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
