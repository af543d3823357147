"""What `setup` makes and no module can keep: arrays, and what refers to a module or a Variable.

Linen runs `setup` in each call. A module that keeps its variables keeps its submodules and plain
values too. An array would have no gradient and would not follow an update, and a copy of the module
would call the one that it was copied from, as a GraphDef takes a bound method as it is. So these
belong to the call, and `setup` runs again in each call of a module that has any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from bridge._conversion.linen_attributes import LinenHolder, is_linen_style
from bridge._errors import InvalidModuleError
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import attributes_of
from bridge._flax.self_references import arrays_within, nodes_in
from bridge._module_calls.calls import LinenStyle, ModuleInCall

from .attributes import OfCall, Otherwise, Ref, is_part, names_of, put_hidden, set_name
from .containers import mapped


def is_of_call(value: object) -> bool:
    """Whether a value that `setup` has made belongs to the call."""
    return bool(nodes_in(value) or arrays_within(value))


def held(record: ModuleInCall, key: str, value: object) -> OfCall:
    """Keeps a value for as long as the call lasts; the `OfCall` stands for it."""
    record.made[key] = value
    return OfCall(key)


def hold_fields(record: ModuleInCall, submodule: nnx.Pytree, name: str) -> None:
    """Does the same for what `setup` gives a submodule: arrays, functions that refer to this call.

    Args:
      record: the module whose `setup` runs.
      submodule: what that has made.
      name: the submodule's name.

    Raises:
      InvalidModuleError: a Linen layer that stays after the call has such a function.
    """
    if isinstance(submodule, LinenHolder):
        if record.call.is_kept and _refers_to_call(record, submodule.to_nnx__module):
            raise InvalidModuleError(
                f"{type(record.module).__name__}.{name}",
                submodule.to_nnx__module,
                "a Linen layer that calls no bridge.Module",
                "a Linen layer keeps its functions as they are, and every copy of the model needs"
                " one that refers to the copy: make it a method of the class",
            )
    elif is_linen_style(type(submodule)):
        for module, path, above in _made_with(submodule, name):
            _hold_own_fields(record, module, path, above)


def _made_with(module: nnx.Pytree, path: str, above: int = 1) -> Iterator[tuple[Any, str, int]]:
    """(module, path, how far up the `setup` is) of a module and of those in its fields."""
    yield module, path, above
    for name, value in list(attributes_of(module).items()):
        if is_linen_style(type(value)):
            yield from _made_with(value, f"{path}/{name}", above + 1)


def _hold_own_fields(record: ModuleInCall, module: LinenStyle, path: str, above: int) -> None:
    for name in type(module).__dataclass_fields__:
        own, names = attributes_of(module), names_of(module)
        value = names.get(name, own.get(name))
        if is_part(value):
            continue

        def without(suffix: str, item: object, name: str = name) -> Any:
            if isinstance(item, jax.Array):
                hidden = put_hidden(module, f"{name}{suffix}", item).name
            elif not isinstance(item, Ref | OfCall | Otherwise) and _refers_to_call(record, item):
                hidden = None
            else:
                return item
            of_call = held(record, f"{path}/{name}{suffix}", item)
            return dataclasses.replace(of_call, above=above, otherwise=hidden)

        known = len(record.made)
        structure = mapped(value, without)
        if len(record.made) > known:
            own.pop(name, None)
            set_name(module, name, structure)


def _refers_to_call(record: ModuleInCall, value: object) -> bool:
    nodes = nodes_in(value)
    if not nodes:
        return False
    below = nodes_below(record.call.root.module)
    known = {id(node) for node in (*below.objects, *below.variables)}
    return any(id(node) in known or record.call.find(node) is not None for node in nodes)
