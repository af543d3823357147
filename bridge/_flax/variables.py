"""Variables: made without their constructor, read and written without their hooks.

Public names but for the three attributes that a Variable is made of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.errors import ImmutableVariableError

from .promises import holds

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


_set = object.__setattr__


def _is_made_of_slots() -> bool:
    """A Variable is its value, its metadata and its trace, in attributes of these names."""
    metadata = dict.fromkeys(REQUIRED_METADATA, False)
    variable: Any = nnx.Variable.from_metadata(1, metadata)
    _set(variable, "_raw_value", 2)
    slots = set(nnx.Variable.__slots__) == {"_raw_value", "_trace_state", "_var_metadata"}
    is_kept = variable.get_raw_value() == 2 and variable._var_metadata == metadata
    return slots and is_kept and variable._trace_state.is_valid() is True


_has_slots = holds("the attributes of an nnx.Variable", _is_made_of_slots, "set_raw_value")


@functools.lru_cache(maxsize=1024)
def class_hooks(var_type: type[nnx.Variable[Any]]) -> frozenset[str]:
    """The hooks that a Variable type defines itself; every Variable of it has them as metadata."""
    return frozenset(hook for hook in HOOKS if hasattr(var_type, hook))


def raw_value(variable: nnx.Variable[Any]) -> Any:
    """What a Variable holds, before its get hooks, and read out of its reference if it has one."""
    value = variable.get_raw_value()
    # Cheap test first: an array is no reference.
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


class RawValues:
    """What some Variables hold, before their hooks and references as they are.

    `get_raw_value` is a call of Python for each Variable, and `set_raw_value` asks JAX which trace
    this is; either costs more than passing the array to a program. Unless there is a hijax one,
    the Variables are asked once which traces they belong to, which never changes.

    Args:
      variables: the Variables.
    """

    def __init__(self, variables: Iterable[nnx.Variable[Any]]):
        self._variables: list[Any] = list(variables)
        self._is_plain = _has_slots and not any(variable.hijax for variable in self._variables)
        self._traces: list[Any] = []
        for variable in self._variables if self._is_plain else ():
            if variable._trace_state not in self._traces:
                self._traces.append(variable._trace_state)

    def get(self) -> list[Any]:
        """The values, in the order of the Variables."""
        if self._is_plain:
            return list(map(_held_value, self._variables))
        return [variable.get_raw_value() for variable in self._variables]

    def set(self, values: Mapping[int, Any]) -> None:
        """Puts in values by the index of their Variable: all of them or none.

        Raises:
          TraceContextError: a Variable belongs to another trace.
        """
        variables = self._variables
        if self._is_plain and all(trace.is_valid() for trace in self._traces):
            for index, value in values.items():
                _set(variables[index], "_raw_value", value)
            return
        before = {index: variables[index].get_raw_value() for index in values}
        try:
            for index, value in values.items():
                variables[index].set_raw_value(value)
        except BaseException:
            for index, value in before.items():
                if variables[index].get_raw_value() is not value:
                    variables[index].set_raw_value(value)
            raise


_held_value = operator.attrgetter("_raw_value")


# For `nnx.use_eager_sharding`: a falsy value that differs from the False of a constructor.
LATER: Any = 0


def mark_eager_sharding(variables: Iterable[nnx.Variable[Any]]) -> None:
    """Says that Variables were made with eager sharding on, which were made with `LATER`.

    Those that are made abstractly, or where there is no mesh, are to be equal to the others.
    """
    for variable in variables:
        try:
            variable.set_metadata("eager_sharding", True)
        except ImmutableVariableError:
            # A hijax Variable in a trace, if it is no reference (Flax 0.12.9 and later).
            continue
