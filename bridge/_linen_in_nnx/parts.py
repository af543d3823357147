"""What a Linen module has inside, as found by binding it to the variables of a ToNNX."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion import linen_attributes
from bridge._conversion.linen_attributes import LinenHolder
from bridge._conversion.neutral import Path
from bridge._flax.linen_modules import children

# In Linen, one key serves every stream that is missing.
_STREAM = "params"


class PartNames(NamedTuple):
    """What there is at a path.

    Attributes:
      found: every attribute of the module that is not one of `nn.Module`, and its submodules;
        None if there is no module, or none that exists outside of a call.
      submodules: the names of those that can be called.
    """

    found: frozenset[str] | None
    submodules: frozenset[str]


class _Known(NamedTuple):
    module: nn.Module
    has_variables: bool
    by_path: dict[tuple[Any, ...], PartNames]


# Weak keys: an entry is dropped with its ToNNX.
_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def names_at(owner: LinenHolder, path: tuple[Any, ...]) -> PartNames:
    """The names that a submodule of a ToNNX answers for; `setup` runs once to find them.

    Args:
      owner: the ToNNX.
      path: the names of the submodule and those above it, empty for the Linen module itself.
    """
    module = owner.to_nnx__module
    holds = has_variables(owner)
    known = _known.get(owner)
    if known is None or known.module is not module or known.has_variables != holds:
        known = _Known(module, holds, {})
        # `setup` depends only on what it reads, but a mutable field may change before the next
        # time.
        if _is_fixed(module):
            _known[owner] = known
    if path not in known.by_path:
        known.by_path[path] = _names(bound_at(owner, path))
    return known.by_path[path]


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


def _names(module: nn.Module | None) -> PartNames:
    if module is None:
        return PartNames(None, frozenset())
    inside = {name for name, child in children(module).items() if isinstance(child, nn.Module)}
    own = own_attributes(type(module))
    made = {name for name in vars(module) if not name.startswith("_")}
    found = (inside | own | made) - {"parent", "name", "scope"}
    return PartNames(frozenset(found), frozenset(inside))


def own_attributes(module_type: type[nn.Module]) -> set[str]:
    """The class attributes of the model."""
    return {name for name in dir(module_type) if is_own_attribute(module_type, name)}


def is_own_attribute(module_type: type[nn.Module], name: str) -> bool:
    """Whether a class attribute is one of the model rather than of `nn.Module`."""
    static = inspect.getattr_static(module_type, name, None)
    return static is not None and static is not inspect.getattr_static(nn.Module, name, None)


_FIXED = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    np.dtype,
    types.NoneType,
    types.FunctionType,
    types.BuiltinFunctionType,
    enum.Enum,
    jax.Array,
    jax.custom_jvp,
    type(jax.jit(lambda: None)),
)


def _is_fixed(value: Any) -> bool:
    """Whether a value is what it was as long as it is the same object."""
    if isinstance(value, _FIXED):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    if isinstance(value, functools.partial):
        return all(map(_is_fixed, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FrozenDict):
        return all(map(_is_fixed, value.values()))
    parameters: Any = getattr(type(value), "__dataclass_params__", None)
    is_frozen = parameters is not None and parameters.frozen
    if isinstance(value, nn.Module) or is_frozen:
        fields = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
        return all(_is_fixed(getattr(value, name)) for name in fields)
    return False


def dict_for_writing(owner: LinenHolder, path: Path) -> dict[Any, Any]:
    """The dict of a submodule's variables in a ToNNX, made if it is not there."""
    if type(vars(owner).get(path[0])) is not dict:
        setattr(owner, path[0], nnx.data({}))
    found = vars(owner)[path[0]]
    for key in path[1:]:
        found = found.setdefault(key, {})
    return found
