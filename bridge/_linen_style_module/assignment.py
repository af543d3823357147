"""What setting an attribute of a `bridge.Module` means: a submodule, a container, another name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeGuard

import jax
from flax import linen as nn
from flax import nnx

from bridge._flax.objects import attributes_of
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._module_calls.calls import LinenStyle, ModuleInCall, joined_record
from bridge._types import Variable

from .attributes import (
    Ref,
    drop_name,
    is_reserved_name,
    names_of,
    put,
    put_hidden,
    put_part,
    put_plain,
    set_name,
)
from .containers import as_linen_keeps, items_within, mapped, opened
from .of_call import held, hold_fields, is_of_call
from .submodules import (
    is_lazy,
    is_mode,
    own,
    place_submodule,
    refer,
    set_modes,
    view,
    wrapped,
)
from .variables import Unclaimed


def assign(module: LinenStyle, name: str, value: object) -> None:
    """Sets an attribute of a `bridge.Module`, as Linen does where that differs from NNX.

    Args:
      module: the module.
      name: the attribute.
      value: a submodule of either kind gets the name; one in a list or a dict gets Linen's name for
        it, such as `layers_0`. A submodule or variable that has its place keeps it.
    """
    if is_reserved_name(name) or hasattr(
        inspect.getattr_static(type(module), name, None), "__set__"
    ):
        put(module, name, value)
        return
    if isinstance(value, dataclasses.Field):
        drop_name(module, name)
        put(module, name, value)
        return
    is_waiting = isinstance(vars(module).get(name), Unclaimed)
    record = joined_record(module, is_copy=is_waiting)
    if record is None and isinstance(value, bool | None) and is_mode(module, name):
        set_modes(module, {name: value})
        return
    if record is not None and record.is_repeating:
        _repeat(record, name, value)
        return
    if isinstance(value, nn.Module):
        value = _wrapped_here(module, record, value)
    if isinstance(value, nnx.Module | nnx.Variable):
        _assign_part(module, record, name, value, is_assigned=True)
    elif opened(value) is not None:
        _assign_container(module, record, name, value)
    elif record is not None and record.in_setup and is_of_call(value):
        _stand_for(module, record, name, held(record, name, value))
    else:
        value = nnx.data(value) if isinstance(value, jax.Array) else value
        put_plain(module, name, value, keeps_part=_is_given(module, record, name))


def _repeat(record: ModuleInCall, name: str, value: object) -> None:
    """Takes what belongs to the call of a value that `setup` has assigned before."""
    for suffix, item in items_within(value):
        key, before = f"{name}{suffix}", attributes_of(record.module).get(f"{name}{suffix}")
        if not _is_part(item):
            if is_of_call(item):
                held(record, key, item)
        elif is_lazy(item) and is_lazy(before) and _name_of(record.module, item) is None:
            # What `setup` makes may call it.
            hold_fields(record, item, key)
            own(record, key, item)
            view(before, item, [field.name for field in dataclasses.fields(item) if field.init])
            record.views.append((before, item))


def _assign_container(
    module: LinenStyle, record: ModuleInCall | None, name: str, value: object
) -> None:
    in_setup = record is not None and record.in_setup
    is_structure = any(
        _is_part(item) or (in_setup and is_of_call(item)) for _, item in items_within(value)
    )
    if not is_structure:
        value = nnx.data(value) if _has_data(value) else as_linen_keeps(value)
        put_plain(module, name, value, keeps_part=_is_given(module, record, name))
        return

    def placed(suffix: str, item: object) -> Any:
        if record is not None and in_setup and not _is_part(item) and is_of_call(item):
            return held(record, f"{name}{suffix}", item)
        if not _is_part(item):
            return put_hidden(module, f"{name}{suffix}", item) if _has_data(item) else item
        known = _name_of(module, item)
        if known is None:
            known = f"{name}{suffix}"
            _assign_part(module, record, known, item)
        return Ref(known)

    def taken_in(suffix: str, item: object) -> Any:
        if isinstance(item, nn.Module):
            item = _wrapped_here(module, record, item)
        if isinstance(item, nnx.Module) and record is not None and _name_of(module, item) is None:
            # Linen asks whose the items are before it looks into any of them.
            own(record, f"{name}{suffix}", item)
        return item

    structure = mapped(mapped(value, taken_in), placed)
    _stand_for(module, record, name, structure)


def _has_data(value: object) -> bool:
    # NNX takes the arrays of a trace for static.
    return any(nnx.is_data(x) or isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def _is_part(item: object) -> TypeGuard[nn.Module | nnx.Module | Variable]:
    return isinstance(item, nn.Module | nnx.Module | nnx.Variable)


def _wrapped_here(
    module: LinenStyle, record: ModuleInCall | None, linen_module: nn.Module
) -> ToNNX:
    """The ToNNX of a Linen module: the one that is here or in the call already if it is tied."""
    for value in attributes_of(module).values():
        if isinstance(value, ToNNX) and value.to_nnx__module is linen_module:
            return value
    known = record and record.call.holder_of(linen_module)
    if known is not None:
        return known
    made = wrapped(linen_module, record)
    if record is not None and record.in_setup and linen_module.name is not None:
        # What is made in `setup` keeps its name; what comes from outside is named by the attribute.
        _assign_part(module, record, linen_module.name, made)
    return made


def _stand_for(
    module: LinenStyle, record: ModuleInCall | None, name: str, structure: object
) -> None:
    """Makes an attribute stand for parts, in the place of what it has been set to before."""
    is_own = name in vars(module) and name not in names_of(module)
    if is_own and not _is_given(module, record, name):
        delattr(module, name)
    set_name(module, name, structure)


def _is_given(module: LinenStyle, record: ModuleInCall | None, name: str) -> bool:
    """Whether a part of this name stays, whatever the attribute is set to.

    It was declared by that name, or was given, and the module will declare it after its `setup`.
    """
    held = vars(module).get(name)
    is_declared = record is not None and (record.in_setup or name in record.reserved)
    return isinstance(held, Unclaimed) or (is_declared and isinstance(held, nnx.Variable))


def _assign_part(
    module: Any,
    record: ModuleInCall | None,
    name: str,
    value: Any,
    *,
    is_assigned: bool = False,
) -> None:
    """Sets an attribute to a submodule or a Variable, or puts it there as an item of another."""
    known = _name_of(module, value)
    if known == name:
        if is_assigned:
            drop_name(module, name)
        return
    if known is not None:
        # Two references would be a shared node, whose path depends on the order of the names.
        _stand_for(module, record, name, Ref(known))
        return
    if isinstance(value, nnx.Variable):
        given = vars(module).get(name)
        if record is not None and record.in_setup and type(given) is type(value):
            # Variables that apply was given are there before setup makes its own.
            value.set_raw_value(given.get_raw_value())
        put_part(module, name, value, is_assigned=is_assigned)
    elif record is not None and own(record, name, value):
        place_submodule(record, name, value, is_assigned=is_assigned)
    else:
        put_part(module, name, value, is_assigned=is_assigned)
        if record is not None:
            refer(module, name)


def _name_of(module: LinenStyle, value: object) -> str | None:
    """The attribute that a value is already in."""
    own = vars(module).items()
    return next((n for n, held in own if held is value and not is_reserved_name(n)), None)
