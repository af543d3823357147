"""Variables: made without their constructor, read and written without their hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.errors import ImmutableVariableError

# What every Variable's metadata holds, and what therefore says nothing about one Variable.
REQUIRED_METADATA: frozenset[str] = nnx.Variable.required_metadata
# The metadata of a Variable that its type, too, may define.
HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


def variable_from_metadata(
    var_type: type[nnx.Variable[Any]], value: object, metadata: Mapping[str, Any]
) -> nnx.Variable[Any]:
    """A Variable with exactly this value and metadata.

    The constructor would run the create hooks a second time and shard an annotated value at once,
    which fails without a mesh; `from_metadata` is what Flax's own merge calls.
    """
    return variable_maker(var_type, metadata)(value)


def variable_maker(
    var_type: type[nnx.Variable[Any]], metadata: Mapping[str, Any]
) -> Callable[[Any], nnx.Variable[Any]]:
    """`variable_from_metadata` for many values; what depends on the type is asked once."""
    defaults = nnx.var_defaults()
    full = {"hijax": defaults.hijax, "ref": defaults.ref, "eager_sharding": False}
    full.update((hook, getattr(var_type, hook)) for hook in class_hooks(var_type))
    full.update(metadata)
    if full["ref"]:
        return lambda value: var_type.from_metadata(jax.new_ref(value), full)
    return lambda value: var_type.from_metadata(value, full)


@functools.lru_cache(maxsize=1024)
def class_hooks(var_type: type[nnx.Variable[Any]]) -> frozenset[str]:
    """The hooks that a Variable type defines itself; every Variable of it has them as metadata."""
    return frozenset(hook for hook in HOOKS if hasattr(var_type, hook))


def raw_value(variable: nnx.Variable[Any]) -> Any:
    """What a Variable holds, before its get hooks, and read out of its reference if it has one."""
    value = variable.get_raw_value()
    # Cheap test first: an array is not a reference.
    return value if isinstance(value, jax.Array) or not variable.ref else value[...]


def leaf_value(leaf: object) -> Any:
    """What a leaf of a flattened module holds: a Variable's raw value, else the leaf itself."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def assign_raw_value(variable: nnx.Variable[Any], value: object) -> None:
    """Puts a value into a Variable as it is: set hooks would change it a second time."""
    if variable.ref:
        variable.get_raw_value()[...] = value
    else:
        variable.set_raw_value(value)


def add_set_hook(variable: nnx.Variable[Any], hook: Callable[[Any, Any], Any]) -> None:
    """Adds a hook that runs before the set hooks of a Variable."""
    own = variable.get_metadata("on_set_value", None) or ()
    hooks = (hook, *own) if isinstance(own, tuple) else (hook, own)
    variable.set_metadata(on_set_value=hooks)


# For `nnx.use_eager_sharding`: a falsy value that differs from the False of a constructor.
LATER: Any = 0


def mark_eager_sharding(variables: Iterable[nnx.Variable[Any]]) -> None:
    """Marks Variables that were made with `LATER` as made with eager sharding.

    Variables made abstractly, or without a mesh, must equal the others.
    """
    for variable in variables:
        try:
            variable.set_metadata("eager_sharding", True)
        except ImmutableVariableError:
            # A hijax Variable in a trace, if it is not a reference (Flax 0.12.9 and later).
            continue
