"""Finds the parts of a Linen module by binding it to a ToNNX's variables, and calls them."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping
from typing import Any, cast

import jax
from flax import linen as nn

from bridge._conversion import linen_attributes
from bridge._conversion.linen_attributes import LinenHolder
from bridge._errors import InvalidMethodError
from bridge._flax.linen_modules import children

from .wrapped_module import OF_LINEN

# In Linen, one key serves every stream that is missing.
_STREAM = "params"


def bound_at(owner: LinenHolder, path: tuple[str, ...]) -> nn.Module | None:
    """A submodule bound to the variables that there are, None if it is made only in a call."""
    module = owner.to_nnx__module
    variables = linen_attributes.as_variables(linen_attributes.held_variables(owner))
    try:
        return below(module.bind(variables), path)
    except Exception:
        # Before there are variables a `setup` that reads one fails; made abstractly, it has them.
        found: list[nn.Module | None] = []

        def make(key: jax.Array) -> None:
            bound = module.bind(variables, rngs={_STREAM: key}, mutable=True)
            found.append(below(bound, path))

        try:
            jax.eval_shape(make, jax.random.key(0))
        except Exception:
            # A call will raise the error.
            return None
        return found[0]


def below(module: nn.Module, path: tuple[str, ...]) -> nn.Module | None:
    """The submodule of a bound module at a path of names, None if there is none."""
    for name in path:
        found = children(module).get(name)
        if found is None:
            return None
        module = found
    children(module)
    return module


def has_any(value: object, kinds: type | types.UnionType) -> bool:
    """Whether a value, or something in a list, tuple or dict, is of one of these types."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    items = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return any(has_any(item, kinds) for item in items)


def part_names(module: nn.Module | None) -> set[str]:
    """Every attribute of a bound module that is not one of `nn.Module`, and its submodules."""
    if module is None:
        return set()
    made = {name for name in vars(module) if not name.startswith("_")}
    return {*submodule_names(module), *own_attributes(type(module)), *made} - OF_LINEN


def submodule_names(module: nn.Module) -> list[str]:
    """The submodules of a bound module that are there outside of a call."""
    return list(children(module))


def own_attributes(module_type: type[nn.Module]) -> set[str]:
    """The class attributes of the model."""
    return {name for name in dir(module_type) if is_own_attribute(module_type, name)}


def is_own_attribute(module_type: type[nn.Module], name: str) -> bool:
    """Whether a class attribute is one of the model rather than of `nn.Module`."""
    static = inspect.getattr_static(module_type, name, None)
    return static is not None and static is not inspect.getattr_static(nn.Module, name, None)


def run_at(
    path: tuple[str, ...], method: str, owner: Any, /, *args: object, **kwargs: object
) -> Any:
    """Calls a method of a submodule through its ToNNX, so that updates are kept."""
    target = None
    if owner.to_nnx__modes:
        target = bound_at(owner, path) if path else owner.to_nnx__module
    # A call of the wrapper has a `method` itself.
    own = {"method": kwargs.pop("method")} if "method" in kwargs else {}
    return owner(*args, method=At(path, method, target, own), **kwargs)


@dataclasses.dataclass(eq=False)
class At:
    """A method of a submodule, as a function of the whole Linen module.

    Attributes:
      path: the names of the submodule and those above it.
      name: the method.
      target: the submodule as it was found before the call, None if that is not known.
      kwargs: keyword arguments of the method that its call through the wrapper cannot have.
    """

    path: tuple[str, ...]
    name: str
    target: nn.Module | None
    kwargs: Mapping[str, object]

    def __post_init__(self) -> None:
        if self.target is not None:
            # `inspect.signature` reads this.
            self.__wrapped__ = getattr(type(self.target), self.name)

    def __call__(self, module: nn.Module, /, *args: object, **kwargs: object) -> Any:
        found = below(module, self.path)
        if found is None:
            remedy = (
                "make the submodule in setup, or read its output by capture_intermediates: in an"
                " nn.compact method it is there in calls only"
            )
            names = submodule_names(module)
            raise InvalidMethodError(type(module), ".".join(self.path), names, remedy)
        return getattr(type(found), self.name)(found, *args, **kwargs)
