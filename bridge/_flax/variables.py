"""Variables: made without their constructor, read and written without their hooks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx import variablelib
from flax.nnx.tracers import TraceState

# What every Variable's metadata holds, and what therefore says nothing about one Variable.
REQUIRED_METADATA: frozenset[str] = nnx.Variable.required_metadata


# The metadata of a Variable that its type, too, may define.
HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


def variable_from_metadata(
    var_type: type[nnx.Variable[Any]], value: Any, metadata: Mapping[str, Any]
) -> nnx.Variable[Any]:
    """A Variable with exactly this value and metadata.

    The constructor would run the create hooks a second time and shard an annotated value at once,
    which fails without a mesh; `from_metadata` is what Flax's own merge calls.
    """
    defaults = nnx.var_defaults()
    full = {"hijax": defaults.hijax, "ref": defaults.ref, "eager_sharding": False}
    full.update((hook, getattr(var_type, hook)) for hook in class_hooks(var_type))
    full.update(metadata)
    if full["ref"]:
        value = jax.new_ref(value)
    return var_type.from_metadata(value, full)


def trace_state() -> TraceState:
    """What a Variable keeps to tell whether it is written into under the trace it was made in."""
    return TraceState()


def variable_in_trace(
    var_type: type[nnx.Variable[Any]], value: Any, metadata: dict[str, Any], trace: TraceState
) -> nnx.Variable[Any]:
    """`from_metadata` of many Variables, for which JAX is asked once which trace this is.

    Asking is most of what making a Variable costs, and `from_metadata` does it for each.
    """
    if metadata["hijax"]:
        return var_type.from_metadata(value, dict(metadata))
    variable = _new(var_type)
    _put_trace(variable, trace)
    _put_metadata(variable, metadata.copy())
    _put_value(variable, value)
    return variable


# By name each of them would be looked up again, for every Variable of every call.
_new = object.__new__


_slots: Any = nnx.Variable


_put_trace = _slots._trace_state.__set__


_put_metadata = _slots._var_metadata.__set__


_put_value = _slots._raw_value.__set__


@functools.lru_cache(maxsize=1024)
def class_hooks(var_type: type[nnx.Variable[Any]]) -> frozenset[str]:
    """The hooks that a Variable type defines itself; every Variable of it has them as metadata."""
    return frozenset(hook for hook in HOOKS if hasattr(var_type, hook))


def raw_value(variable: nnx.Variable[Any]) -> Any:
    """What a Variable holds, before its get hooks, and read out of its reference if it has one."""
    value = variable.get_raw_value()
    return value[...] if variable.ref else value


def assign_raw_value(variable: nnx.Variable[Any], value: Any) -> None:
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


# `get_raw_value` of a Variable that is not a hijax one, which would be a call of Python.
held_value = operator.attrgetter("_raw_value")


class RawValues:
    """What some Variables hold, before their hooks and references as they are.

    `get_raw_value` is a call of Python for each Variable, and `set_raw_value` asks JAX twice which
    trace this is; either costs more than passing the array to a program. Here the Variables are
    asked once which traces they belong to, which never changes.

    Args:
      variables: the Variables.
    """

    def __init__(self, variables: Iterable[nnx.Variable[Any]]):
        self._variables = list(variables)
        self._is_plain = not any(variable.hijax for variable in self._variables)
        self._traces: list[TraceState] = []
        for variable in self._variables if self._is_plain else ():
            if variable._trace_state not in self._traces:
                self._traces.append(variable._trace_state)

    def get(self) -> list[Any]:
        """The values, in the order of the Variables."""
        if self._is_plain:
            return list(map(held_value, self._variables))
        return [variable.get_raw_value() for variable in self._variables]

    def set(self, values: Mapping[int, Any]) -> None:
        """Puts in values by the index of their Variable: all of them or none.

        Raises:
          TraceContextError: a Variable belongs to another trace.
        """
        variables = self._variables
        if self._is_plain and all(trace.is_valid() for trace in self._traces):
            for index, value in values.items():
                object.__setattr__(variables[index], "_raw_value", value)
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


# For `nnx.use_eager_sharding`: as good as False, and told from a False that a constructor asks for.
LATER: Any = 0


def mark_eager_sharding(variables: Iterable[nnx.Variable[Any]]) -> None:
    """Says that Variables were made with eager sharding on, which were made with `LATER`.

    Those that are made abstractly, or where there is no mesh, are to be equal to the others; the
    public setter refuses a change.
    """
    late: list[Any] = [v for v in variables if v.eager_sharding is LATER]
    for variable in late:
        if not variable.hijax:
            variable._var_metadata["eager_sharding"] = True
        elif variable.has_qdd:
            state = variablelib._get_hijax_state(variable)
            state._var_metadata["eager_sharding"] = True
            variablelib._set_hijax_state(variable, state)
