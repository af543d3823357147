"""Raises for unsuitable arguments of ToLinen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._errors import InvalidModuleError


def check_instance(module: Any) -> None:
    """Raises InvalidModuleError for what is no NNX module that exists."""
    is_state = isinstance(module, nnx.State) or (
        isinstance(module, type) and issubclass(module, nnx.State)
    )
    if isinstance(module, nnx.Pytree) and not is_state:
        return
    if is_state:
        remedy = "put it together with its GraphDef: nnx.merge(graphdef, state)"
    elif isinstance(module, type) and issubclass(module, nnx.Pytree):
        name = module.__name__
        remedy = (
            f"for a class use ToLinen({name}, args=(…), kwargs={{…}}) or to_linen({name}, …), whose"
            " init constructs the module"
        )
    elif isinstance(module, nn.Module) or (
        isinstance(module, type) and issubclass(module, nn.Module)
    ):
        remedy = (
            "it is Linen already, so use it as it is (ToNNX is the wrapper for the other direction)"
        )
    else:
        remedy = "pass an instance of a subclass of flax.nnx.Module"
    raise InvalidModuleError("ToLinen.from_module", module, "an NNX module instance", remedy)


def check_arguments(nnx_class: Any, args: Any, kwargs: Any) -> None:
    """Raises InvalidModuleError for `args` and `kwargs` that a constructor cannot take."""
    # A module is constructed again for each binding, and then both are as they should be.
    is_list = type(args) is tuple or (isinstance(args, Sequence) and not isinstance(args, str))
    is_dict = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if is_list and is_dict:
        return
    name = getattr(nnx_class, "__name__", type(nnx_class).__name__)
    positional, by_name = "args as a tuple of positional arguments", "kwargs as a dict by name"
    expected = [*([] if is_list else [positional]), *([] if is_dict else [by_name])]
    found = kwargs if is_list else args if is_dict else (args, kwargs)
    raise InvalidModuleError(
        f"ToLinen of {name}",
        found,
        " and ".join(expected),
        f"write ToLinen({name}, args=(…), kwargs={{…}}), or to_linen({name}, …) with the arguments"
        " as in the constructor's own call",
    )
