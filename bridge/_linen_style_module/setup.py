"""`setup` of a `bridge.Module`: when it runs, and what a read returns of what it has made."""

from __future__ import annotations

from typing import Any

from bridge._errors import DeclarationError
from bridge._flax.objects import attributes_of
from bridge._module_calls.calls import (
    MODULE_CONTEXT,
    LinenStyle,
    ModuleInCall,
    joined,
    joined_record,
)

from .attributes import IS_SETUP, OfCall, Otherwise, Ref, Setup, class_attribute
from .containers import mapped
from .outermost import call_of, in_call


def set_up(record: ModuleInCall) -> None:
    """Runs `setup` of a module that is part of a call.

    It runs once for as long as the module lives, or in each call if it makes what belongs to one.
    """
    own = attributes_of(record.module)
    if record.in_setup or record.is_set_up or own[IS_SETUP] == Setup.ONCE:
        return
    record.in_setup = True
    MODULE_CONTEXT.module_stack.append(record)
    try:
        type(record.module).setup(record.module)
        if record.made or not own[IS_SETUP]:
            own[IS_SETUP] = Setup.IN_EACH_CALL if record.made else Setup.ONCE
        record.is_set_up = True
    finally:
        MODULE_CONTEXT.module_stack.pop()
        record.in_setup = False
        record.type_counter.clear()


def ensure_setup(module: LinenStyle) -> None:
    """Runs `setup`, if it has not been run."""
    if attributes_of(module)[IS_SETUP]:
        return
    above = joined()
    record = above and above.call.find(module)
    if record:
        set_up(record)
    elif above is None:
        in_call(call_of(module), set_up)


def read_attribute(module: LinenStyle, name: str, structure: object) -> Any:
    """What a read of an attribute returns for which `set_name` has said something.

    Raises:
      AttributeError: a part is gone, or the class has no member of this name.
      DeclarationError: it belongs to a call of the module around this one, which does not run.
    """
    if structure is not Otherwise.CLASS:
        try:
            return mapped(structure, lambda _, item: _resolved(module, name, item))
        except KeyError:
            pass
    return class_attribute(module, name)


def _resolved(module: LinenStyle, name: str, item: object) -> Any:
    """What an item of a structure stands for; KeyError, if it is gone."""
    if isinstance(item, Ref):
        return attributes_of(module)[item.name]
    if isinstance(item, OfCall):
        return _made(module, name, item)
    return item


def _made(module: LinenStyle, name: str, of_call: OfCall) -> Any:
    """What `setup` makes in the call that runs, or in one of its own."""
    owner = joined_record(module)
    for _ in range(of_call.above):
        owner = owner and owner.parent
    if owner is not None:
        set_up(owner)
        return owner.made[of_call.key]
    if of_call.otherwise is not None:
        return attributes_of(module)[of_call.otherwise]
    if of_call.above:
        what = f"{type(module).__name__}.{name} refers to the module around, and is there"
        raise DeclarationError.of_use(what, "that one")

    def in_own_call(record: ModuleInCall) -> Any:
        set_up(record)
        return record.made[of_call.key]

    return in_call(call_of(module), in_own_call)
