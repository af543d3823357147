"""Attributes that `setup` computes from variables, such as a parameter in another dtype.

Linen runs `setup` again in each call. A module that keeps its variables runs it once, so an array
that it stored would have no gradient and would not follow an update. Such an attribute is computed
again in each call that reads it, by the `setup` of a copy with the same Variables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from flax import nnx

from bridge._flax.objects import attributes_of
from bridge._flax.self_references import arrays_within
from bridge._flax.variables import raw_value
from bridge._module_calls.calls import ModuleInCall, record_of
from bridge._randomness.live_inputs import live_inputs

from .attributes import (
    IS_SETUP,
    Standin,
    drop_name,
    is_part,
    is_reserved_name,
    names_of,
    refs,
    set_name,
)


@dataclasses.dataclass(frozen=True)
class Derived(Standin):
    """Stands for an attribute that is computed from variables.

    Attributes:
      run_setup: runs the `setup` of a module in a call of its own.
    """

    run_setup: Callable[[Any], None]

    def of(self, module: Any, name: str) -> Any:
        """The attribute of a module."""
        record = record_of(module)
        if record is None:
            return getattr(self._copy(module), name)
        if name not in record.derived:
            copy, names = self._copy(module), names_of(module)
            known = [known for known in names if isinstance(names[known], Derived)]
            record.derived |= {known: getattr(copy, known) for known in known}
        return record.derived[name]

    def _copy(self, module: Any) -> Any:
        graphdef, state = nnx.split(module, graph=True)
        return _set_up_again(nnx.merge(graphdef, state), self.run_setup)


def find_derived(record: ModuleInCall, run_setup: Callable[[Any], None]) -> None:
    """Finds the attributes of a module, whose `setup` was run, that are computed from variables.

    Args:
      record: the module.
      run_setup: as for `Derived`.
    """
    module = record.module
    candidates = {name for name, _ in _arrays(module)}
    if not candidates:
        return
    graphdef, state = nnx.split(module, graph=True)
    values = {
        path: raw_value(variable)
        for path, variable in _by_path(state)
        if isinstance(variable, nnx.Variable) and _has_gradient(raw_value(variable))
    }

    def computed(names: Collection[str], values: dict[str, Any]) -> list[Any]:
        copy = nnx.merge(graphdef, state, copy=True)
        for path, variable in _by_path(nnx.state(copy, graph=True)):
            if path in values:
                variable.set_raw_value(values[path])
        _set_up_again(copy, run_setup)
        return [array for name, array in _arrays(copy) if name in names]

    def are_derived(names: Collection[str]) -> bool:
        try:
            return bool(live_inputs(functools.partial(computed, names), values))
        except Exception:
            # It looks at values, or calls what the module around has given: it is run only once.
            return False

    # Most are constants, which one look tells.
    for name in sorted(candidates) if values and are_derived(candidates) else ():
        if are_derived({name}):
            record.derived[name] = getattr(module, name)
            hidden = [x for x in refs(names_of(module).get(name)) if is_reserved_name(x)]
            for place in (name, *hidden):
                if not is_part(attributes_of(module).get(place)):
                    attributes_of(module).pop(place, None)
            set_name(module, name, Derived(run_setup))


def _set_up_again(copy: Any, run_setup: Callable[[Any], None]) -> Any:
    for name, structure in names_of(copy).items():
        if isinstance(structure, Derived):
            drop_name(copy, name)
    attributes_of(copy)[IS_SETUP] = False
    run_setup(copy)
    return copy


def _by_path(state: Any) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(state):
        yield "/".join(map(str, path)), variable


def _has_gradient(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def _arrays(module: Any) -> Iterator[tuple[str, jax.Array]]:
    """(attribute, array) of what `setup` has set that is no part, nor a field."""
    own, names = attributes_of(module), names_of(module)
    held = {name: value for name, value in own.items() if not is_part(value)}
    for name, value in {**held, **names}.items():
        if is_reserved_name(name) or name in type(module).__dataclass_fields__:
            continue
        hidden = [own.get(place) for place in refs(value) if is_reserved_name(place)]
        for array in itertools.chain(arrays_within(value), *map(arrays_within, hidden)):
            yield name, array
