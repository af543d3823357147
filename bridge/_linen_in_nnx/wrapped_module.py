"""The Linen module in a ToNNX: what it may be, what it brings along, its fields and signature."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._errors import InvalidModuleError

# Where Linen keeps where a module is, and its scope; a ToNNX is somewhere else.
OF_LINEN = frozenset({"parent", "name", "scope"})


def free_module(module: nn.Module) -> tuple[nn.Module, Mapping[str, Any]]:
    """A Linen module without its scope, and the variables that the scope held for it.

    A module that is made during another module's call becomes a child of that one, and has a scope
    without variables.
    """
    scope = module.scope
    if scope is None and not isinstance(module.parent, nn.Module):
        return module, {}
    free = module.clone(parent=None, name=None)
    if scope is None or scope.invalid:
        return free, {}
    return free, {collection: tree for collection, tree in module.variables.items() if tree}


def check_module(module: object) -> None:
    """Raises InvalidModuleError for what is not a Linen module instance."""
    if isinstance(module, nn.Module):
        return
    expected = "a Linen module instance"
    kind: type[Any] = module if isinstance(module, type) else type(module)
    if issubclass(kind, nn.Module):
        remedy = f"make an instance of it: ToNNX({kind.__name__}(…))"
    elif issubclass(kind, nnx.Module):
        remedy = (
            "it is NNX already, so use it as it is (ToLinen is the wrapper for the other direction)"
        )
    else:
        remedy = "pass an instance of a subclass of flax.linen.Module"
    raise InvalidModuleError("ToNNX", module, expected, remedy)


def field_names(module: nn.Module) -> set[str]:
    """The dataclass fields of a Linen module, without Linen's own."""
    return set(type(module).__dataclass_fields__) - OF_LINEN


def call_signature(wrapper: type[nnx.Module], module: nn.Module) -> inspect.Signature:
    """The arguments of a ToNNX's call: those of the Linen module's, and the wrapper's own.

    `nnx.Sequential` hands a keyword only to layers whose signature has it. Raises AttributeError if
    the Linen module cannot be called, so that the wrapper's class answers.
    """
    if not callable(module):
        raise AttributeError("__signature__")
    kind: Any = type(module)
    of_call = list(inspect.signature(kind.__call__).parameters.values())[1:]
    of_wrapper = inspect.signature(wrapper.__call__).parameters.values()
    names = {parameter.name for parameter in of_call}
    own = [p for p in of_wrapper if p.kind is p.KEYWORD_ONLY and p.name not in names]
    # A keyword-only argument comes before `**kwargs`.
    parameters = sorted([*of_call, *own], key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters)
