"""Which attributes and methods of a Linen module a ToNNX answers for."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

from . import _linen_variables
from ._errors import InvalidMethodError, InvalidModuleError
from ._flax_internals import unbound_function
from ._submodule import Submodule


class Answer:
    """An attribute of the Linen module; a class of its own, since None is a value too."""

    def __init__(self, value: Any):
        self.value = value


def linen_attribute(wrapper: Any, module: nn.Module, name: str) -> Answer | None:
    """A field, a method, another class attribute, or a submodule made in `setup`."""
    if name in field_names(module) and name not in ("parent", "name"):
        return Answer(getattr(module, name))
    static = inspect.getattr_static(type(module), name, None)
    if static is not None and static is not inspect.getattr_static(nn.Module, name, None):
        if inspect.isfunction(static):
            return Answer(types.MethodType(functools.partial(_call_method, name), wrapper))
        return Answer(getattr(module, name))
    if type(module).setup is not nn.Module.setup and _is_submodule(wrapper, module, name):
        return Answer(Submodule(wrapper, (name,), {}))
    return None


def _call_method(name: str, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper(*args, method=name, **kwargs)


def _is_submodule(wrapper: Any, module: nn.Module, name: str) -> bool:
    """Whether `setup` makes a submodule of this name, one without variables of its own."""
    held = _linen_variables.held_variables(wrapper)
    try:
        bound = module.bind(_linen_variables.to_linen(held))
        return isinstance(getattr(bound, name, None), nn.Module)
    except flax_errors.FlaxError:
        # Without variables setup may fail, and then nothing is known about the name.
        return False


def function_of(module: nn.Module, method: Callable[..., Any] | str | None) -> Callable[..., Any]:
    """The unbound function to call, for what `Module.apply` accepts as `method`."""
    if isinstance(method, str):
        found = getattr(type(module), method, None)
        if not callable(found):
            raise InvalidMethodError(type(module), method, _method_names(module))
        return found
    if method is None:
        method = type(module).__call__
    if not callable(method):
        raise InvalidMethodError(type(module), method, _method_names(module))
    return unbound_function(method)


def _method_names(module: nn.Module) -> set[str]:
    own = {n for n in dir(type(module)) if inspect.isfunction(getattr(type(module), n, None))}
    own -= set(dir(nn.Module)) | set(field_names(module))
    return {n for n in own if not n.startswith("_")} | {"__call__"}


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
