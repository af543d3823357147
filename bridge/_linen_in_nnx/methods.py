"""Which attributes and methods of a Linen module a ToNNX answers for."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._errors import InvalidModuleError

from .parts import has_modules, is_own_attribute
from .submodule import Answer, found_at
from .submodule_call import run_at

# Linen keeps where a module is in them; a ToNNX is somewhere else.
UNBOUND_FIELDS = ("parent", "name")


def linen_attribute(wrapper: Any, module: nn.Module, name: str) -> Answer | None:
    """A field, a method, another class attribute, or what was made in `setup`."""
    if name in field_names(module) and name not in UNBOUND_FIELDS:
        value = getattr(module, name)
        if not has_modules(value):
            return Answer(value)
    elif is_own_attribute(type(module), name) and inspect.isfunction(
        inspect.getattr_static(type(module), name)
    ):
        return Answer(types.MethodType(functools.partial(run_at, (), name), wrapper))
    return found_at(wrapper, (), name)


def call_signature(wrapper: type[Any], module: nn.Module) -> inspect.Signature:
    """The arguments of a ToNNX's call: those of the Linen module's, and the wrapper's own.

    `nnx.Sequential` hands a keyword only to layers whose signature has it.

    Raises:
      AttributeError: the Linen module cannot be called, so the wrapper's class answers.
    """
    if not callable(module):
        raise AttributeError("__signature__")
    of_call = list(inspect.signature(type(module).__call__).parameters.values())[1:]
    of_wrapper = inspect.signature(wrapper.__call__).parameters.values()
    names = {parameter.name for parameter in of_call}
    own = [p for p in of_wrapper if p.kind is p.KEYWORD_ONLY and p.name not in names]
    # A keyword-only argument comes before `**kwargs`.
    parameters = sorted([*of_call, *own], key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters)


def field_names(module: nn.Module) -> Mapping[str, Any]:
    """The dataclass fields of a Linen module."""
    return type(module).__dataclass_fields__


def check_module(module: Any) -> None:
    """Raises InvalidModuleError for what is no Linen module instance."""
    if isinstance(module, nn.Module):
        return
    expected = "a Linen module instance"
    if isinstance(module, type) and issubclass(module, nn.Module):
        remedy = f"make an instance of it: ToNNX({module.__name__}(…))"
    elif isinstance(module, nnx.Module) or (
        isinstance(module, type) and issubclass(module, nnx.Module)
    ):
        remedy = (
            "it is NNX already, so use it as it is (ToLinen is the wrapper for the other direction)"
        )
    else:
        remedy = "pass an instance of a subclass of flax.linen.Module"
    raise InvalidModuleError("ToNNX", module, expected, remedy)
