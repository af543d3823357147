"""What a Linen module has inside, as found by binding it to the variables of a ToNNX."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from bridge._conversion import linen_attributes
from bridge._conversion.linen_attributes import LinenHolder
from bridge._conversion.neutral import Path
from bridge._flax.linen_modules import children

# In Linen, one key serves every stream that is missing.
_STREAM = "params"
# What Linen keeps on a module: where it is, and its scope.
OF_LINEN = frozenset({"parent", "name", "scope"})


def bound_at(owner: LinenHolder, path: tuple[Any, ...]) -> nn.Module | None:
    """A submodule bound to the variables that there are, None if it is made only in a call."""
    module = owner.to_nnx__module
    variables = linen_attributes.as_variables(linen_attributes.held_variables(owner))
    try:
        return below(module.bind(variables), path)
    except Exception:
        # Before there are variables a `setup` that reads one fails; made abstractly, it has them.
        found: list[nn.Module | None] = []

        def make(key: Any) -> None:
            bound = module.bind(variables, rngs={_STREAM: key}, mutable=True)
            found.append(below(bound, path))

        try:
            jax.eval_shape(make, jax.random.key(0))
        except Exception:
            # A call will raise the error.
            return None
        return found[0]


def below(module: nn.Module, path: tuple[Any, ...]) -> nn.Module | None:
    """The submodule of a bound module at a path of names, None if there is none."""
    found: Any = module
    for name in path:
        found = children(found).get(name)
        if not isinstance(found, nn.Module):
            return None
    children(found)
    return found


def has_variables(owner: LinenHolder) -> bool:
    """Whether a ToNNX holds variables."""
    own = linen_attributes.is_own_name
    return any(isinstance(v, dict | nnx.Variable) for n, v in vars(owner).items() if not own(n))


def has_modules(value: Any) -> bool:
    """Whether a value is a Linen module, or a list, tuple or dict with one in it."""
    if isinstance(value, Mapping):
        return any(map(has_modules, value.values()))
    return isinstance(value, nn.Module) or (
        isinstance(value, list | tuple) and any(map(has_modules, value))
    )


def part_names(module: nn.Module | None) -> set[str]:
    """Every attribute of a bound module that is not one of `nn.Module`, and its submodules."""
    if module is None:
        return set()
    inside = {name for name, child in children(module).items() if isinstance(child, nn.Module)}
    made = {name for name in vars(module) if not name.startswith("_")}
    return (inside | own_attributes(type(module)) | made) - OF_LINEN


def own_attributes(module_type: type[nn.Module]) -> set[str]:
    """The class attributes of the model."""
    return {name for name in dir(module_type) if is_own_attribute(module_type, name)}


def is_own_attribute(module_type: type[nn.Module], name: str) -> bool:
    """Whether a class attribute is one of the model rather than of `nn.Module`."""
    static = inspect.getattr_static(module_type, name, None)
    return static is not None and static is not inspect.getattr_static(nn.Module, name, None)


def dict_for_writing(owner: LinenHolder, path: Path) -> dict[Any, Any]:
    """The dict of a submodule's variables in a ToNNX, made if it is not there."""
    if type(vars(owner).get(path[0])) is not dict:
        setattr(owner, path[0], nnx.data({}))
    found = vars(owner)[path[0]]
    for key in path[1:]:
        found = found.setdefault(key, {})
    return found
