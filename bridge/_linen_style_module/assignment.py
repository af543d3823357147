"""Sets attributes of a `bridge.Module`: to submodules, containers of them, other values."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

from flax import linen as nn
from flax import nnx

from bridge._flax.objects import attributes_of
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._module_calls.calls import LinenStyle, ModuleInCall, joined_record
from bridge._types import Variable

from .attributes import (
    REPLACED,
    Otherwise,
    Ref,
    drop_name,
    is_part,
    is_property,
    is_reserved_name,
    names_of,
    put,
    put_part,
    put_plain,
    set_name,
    stand_in,
)
from .containers import items_within, mapped
from .of_call import check_fields, is_of_call
from .submodules import is_lazy, own, place_submodule, refer


def assign(module: LinenStyle, name: str, value: object) -> None:
    """Sets an attribute of a `bridge.Module`, as Linen does where that differs from NNX.

    A submodule of either kind is named after the attribute; one in a list or a dict gets Linen's
    name for it, such as `layers_0`. A submodule or variable that already has a place keeps it.
    """
    if is_reserved_name(name) or is_property(type(module), name):
        put(module, name, value)
        return
    if isinstance(value, dataclasses.Field):
        drop_name(module, name)
        put(module, name, value)
        return
    record = joined_record(module)
    if record is not None and record.is_repeating:
        _repeat(record, name, value)
    elif any(_is_part(x) or _is_of_call(record, x) for _, x in items_within(value)):
        _assign_structure(module, record, name, value)
    else:
        # Linen keeps lists as tuples and dicts as FrozenDicts.
        value = mapped(value, lambda _, item: item)
        put_plain(module, name, value, keeps_part=record is not None)


def _repeat(record: ModuleInCall, name: str, value: object) -> None:
    """Takes what belongs to the call of a value that `setup` has assigned before."""
    for suffix, item in items_within(value):
        key = f"{name}{suffix}"
        held = attributes_of(record.module).get(key)
        if is_lazy(item) and is_lazy(held):
            # What `setup` makes may call it.
            own(record, key, held)
            record.call.replace(item, held)
        elif not _is_part(item) and is_of_call(item):
            record.made[key] = item


def _assign_structure(
    module: LinenStyle, record: ModuleInCall | None, name: str, value: object
) -> None:
    """Sets an attribute to parts, to what belongs to a call, or to containers of these."""

    def taken_in(suffix: str, item: object) -> Any:
        if isinstance(item, nn.Module):
            item = _wrapped_here(module, record, item)
        is_module = isinstance(item, nnx.Module)
        if is_module and record is not None and _name_of(module, record, item) is None:
            # Linen asks for the owners of all items before it looks into any of them.
            own(record, f"{name}{suffix}", item)
        return item

    def placed(suffix: str, item: object) -> Any:
        key = f"{name}{suffix}"
        if record is not None and not _is_part(item) and _is_of_call(record, item):
            record.made[key] = item
            return Otherwise.CALL
        if not _is_part(item):
            return stand_in(module, key, item)
        known = _name_of(module, record, item)
        if known is None:
            known = key
            _put(module, record, key, item)
        return Ref(known)

    structure, before = mapped(mapped(value, taken_in), placed), names_of(module).get(name)
    if isinstance(before, Ref) and before == structure:
        # The module may belong to another trace.
        return
    if structure != Ref(name):
        # Two references would be a shared node; its path would depend on the order of the names.
        stays = record is not None and is_part(vars(module).get(name))
        if name in vars(module) and name not in names_of(module) and not stays:
            delattr(module, name)
        set_name(module, name, structure)
    else:
        drop_name(module, name)


def _put(module: LinenStyle, record: ModuleInCall | None, name: str, part: Any) -> None:
    """Puts a submodule or a Variable that has no place yet into the attribute of its name."""
    if isinstance(part, nnx.Variable):
        given: Any = vars(module).get(name)
        if record is not None and record.in_setup and type(given) is type(part):
            # Variables that apply was given are there before setup makes its own.
            part.set_raw_value(given.get_raw_value())
        put_part(module, name, part)
    elif record is not None and own(record, name, part):
        place_submodule(record, name, part)
    else:
        if record is not None:
            check_fields(record, part, name)
            refer(module, name)
        elif isinstance(vars(module).get(name), nnx.Module):
            put(module, REPLACED, (*getattr(module, REPLACED), name))
        put_part(module, name, part)


def _wrapped_here(
    module: LinenStyle, record: ModuleInCall | None, linen_module: nn.Module
) -> ToNNX:
    """The ToNNX of a Linen module: the one that is here or in the call already if it is tied."""
    for value in attributes_of(module).values():
        if isinstance(value, ToNNX) and value.to_nnx__module is linen_module:
            return value
    known: Any = record and record.call.holders.get(id(linen_module))
    if known is not None:
        return known[0]
    made = ToNNX(linen_module)
    if record is not None and record.in_setup and linen_module.name is not None:
        # What is made in `setup` keeps its name; what comes from outside is named by the attribute.
        _put(module, record, linen_module.name, made)
    return made


def _is_part(item: object) -> TypeGuard[nn.Module | nnx.Module | Variable]:
    return isinstance(item, nn.Module | nnx.Module | nnx.Variable)


def _is_of_call(record: ModuleInCall | None, item: object) -> bool:
    return record is not None and record.in_setup and is_of_call(item)


def _name_of(module: LinenStyle, record: ModuleInCall | None, value: object) -> str | None:
    """The attribute that a value is already in, or that it is a view of."""
    for before, fresh in record.views if record is not None else ():
        value = before if value is fresh else value
    own = vars(module).items()
    return next((n for n, held in own if held is value and not is_reserved_name(n)), None)
