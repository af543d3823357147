"""Gives a submodule its place: a new one, or that of an earlier call with other fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, TypeGuard

from flax import nnx

from bridge._conversion.linen_attributes import LinenHolder, is_linen_style, is_own_name
from bridge._errors import NameInUseError
from bridge._fingerprint import fingerprint
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import (
    DATA_NOTE,
    attributes_of,
    is_data_attribute,
    is_initializing,
    is_note,
    set_initializing,
)
from bridge._module_calls.calls import LinenStyle, ModuleInCall
from bridge._module_calls.scope import is_of_linen
from bridge._train_eval import MODE_FIELDS

from .attributes import (
    IS_SETUP,
    NAMES,
    REPLACED,
    SCOPE,
    AttrPriority,
    has_room,
    held_by,
    is_part,
    names_of,
    priorities_of,
    put,
    put_part,
    refs,
    set_name,
    set_priority,
)
from .of_call import check_fields
from .variables import PendingVariables, claim, is_vacant


def auto_name(record: ModuleInCall, kind: type) -> str:
    """Linen's name for the next submodule of a class."""
    index = record.type_counter[kind.__name__]
    record.type_counter[kind.__name__] += 1
    return f"{kind.__name__}_{index}"


def reserve(record: ModuleInCall, name: str, what: str) -> None:
    """Takes a name of a module. Raises NameInUseError if it is taken."""
    is_of_field = not record.in_setup and _is_of_field(record.module, name)
    if name in record.reserved or is_of_field:
        raise NameInUseError(what, name, type(record.module).__name__)
    record.reserved.add(name)


def _is_of_field(module: LinenStyle, name: str) -> bool:
    """Whether a submodule that a field holds lives in the attribute of this name."""
    names, fields = names_of(module), type(module).__dataclass_fields__
    if name in fields and name not in names:
        return is_part(attributes_of(module).get(name))
    return any(name in refs(structure) for n, structure in names.items() if n in fields)


def place_submodule(record: ModuleInCall, name: str, submodule: nnx.Module) -> Any:
    """Gives a submodule its place in a module that is being called.

    Returns the module at that place: this one, or the one of an earlier call if its fields are the
    same. Raises NameInUseError if something else has the name.
    """
    if record.is_declaring:
        reserve(record, name, "submodule")
    check_fields(record, submodule, name)
    module = record.module
    before = attributes_of(module).get(name)
    stays = record.is_repeating or name in getattr(module, REPLACED)
    if before is submodule or (stays and isinstance(before, nnx.Module)):
        return before
    placed: Any = submodule
    if isinstance(before, nnx.Pytree) and not isinstance(before, PendingVariables):
        placed = reused(before, submodule)
        if placed is None:
            raise NameInUseError("submodule", name, type(module).__name__)
        if placed is submodule:
            record.views.append((before, submodule))
            if record.in_setup:
                # Only a view has a part before its `setup` has run.
                attributes_of(module)[name] = submodule
    else:
        if isinstance(before, PendingVariables):
            claim(submodule, before, f"{type(module).__name__}/{name}")
        elif is_vacant(before):
            delattr(module, name)
        elif not has_room(module, name):
            raise NameInUseError("submodule", name, type(module).__name__)
        put_part(module, name, submodule)
        for node in nodes_below(submodule).objects:
            _set_modes(node, module)
    join_call(record, name, placed)
    return placed


def _set_modes(node: nnx.Pytree, around: LinenStyle) -> None:
    """Sets what `train()` and `eval()` have set on the module around; what a field says stays."""
    for name in {*MODE_FIELDS} - {*type(around).__dataclass_fields__}:
        value = attributes_of(around).get(name)
        # A part of the model may have the name.
        is_mode = isinstance(value, bool) and isinstance(node, nnx.Module)
        if is_mode and hasattr(node, name):
            if not is_lazy(node):
                setattr(node, name, value)
            elif getattr(node, name) is None:
                put(node, name, value)


def own(record: ModuleInCall, name: str, submodule: nnx.Module) -> bool:
    """Makes a module the owner of a submodule, unless the submodule has one.

    Returns whether the module is the owner and the submodule has this name.
    """
    call, path = record.call, (*record.path, name)
    if isinstance(submodule, LinenHolder):
        return call.holders.setdefault(id(submodule.to_nnx__module), (submodule, path))[1] == path
    if not is_lazy(submodule):
        return True
    found = call.find(submodule)
    if found is None:
        found = call.attach(submodule, record, name)
    elif not found.is_owned:
        found.is_owned, found.path = True, path
    return found.path == path


def join_call(record: ModuleInCall, name: str, submodule: nnx.Module) -> None:
    """Makes a submodule, with all that is below it, part of the call that its parent is part of."""
    own(record, name, submodule)
    found = record.call.find(submodule)
    if found is not None:
        adopt_fields(found)
        return
    creates = is_initializing(record.module)
    is_first = record.is_declaring or not attributes_of(record.module)[IS_SETUP]
    if (creates or is_first) and isinstance(submodule, LinenHolder):
        _give_keys(submodule, record.rngs)
    if creates:
        set_initializing(nodes_below(submodule).objects, True)


def adopt_fields(record: ModuleInCall) -> None:
    """Makes the submodules of a module part of its call, but for references to those of others."""
    held, holders = attributes_of(record.module), record.call.holders
    for name in _own_submodules(record.module):
        value: Any = held[name]
        if isinstance(value, LinenHolder):
            first, _ = holders.get(id(value.to_nnx__module), (value, ()))
            has_variables = any(isinstance(x, nnx.Variable | dict) for x in vars(value).values())
            if first is not value and not has_variables:
                # Linen knows a module that is in two places as one.
                held[name] = value = first
        if own(record, name, value):
            join_call(record, name, value)
        else:
            refer(record.module, name)


def _own_submodules(module: LinenStyle) -> list[str]:
    """The attributes with submodules that are no references: fields first, in their order.

    Keys are drawn in this order. A copy has its attributes in another order.
    """
    held, names, priorities = attributes_of(module), names_of(module), priorities_of(module)
    fields = [n for f in type(module).__dataclass_fields__ for n in (f, *refs(names.get(f)))]
    return [
        name
        for name in dict.fromkeys((*fields, *held))
        if (is_lazy(value := held.get(name)) or isinstance(value, LinenHolder))
        and priorities.get(name) != AttrPriority.LOW
    ]


def refer(module: LinenStyle, name: str) -> None:
    """Notes that an attribute refers to a submodule of another module, which owns it."""
    if name not in priorities_of(module):
        set_priority(module, name, AttrPriority.LOW)


def is_lazy(value: object) -> TypeGuard[LinenStyle]:
    """Whether a value is a `bridge.Module`; its class is in a package above."""
    return is_linen_style(type(value))


def _give_keys(module: LinenHolder, rngs: nnx.Rngs) -> None:
    """Gives a Linen module streams of its own, named as Linen would have named them."""
    if len(rngs) and module.to_nnx__rngs is None:
        streams = rngs.fork()
        if is_of_linen(rngs) and "default" in streams and "params" not in streams:
            named = {"params" if n == "default" else n: s for n, s in streams.items()}
            streams = nnx.Rngs(**named)
        module.to_nnx__rngs = streams


def reused(before: nnx.Pytree, fresh: Any) -> Any:
    """The submodule of an earlier call in the place of one that was just made.

    A compact method makes its submodules anew at each call. Variables stay where they are, so a
    call that changes nothing writes nothing, and other references to a submodule stay valid.

    Returns `before`, which holds the variables, if its fields are those of `fresh`; `fresh` as a
    view of it if they are not; None if the two are of different kinds.
    """
    if is_lazy(before) and is_lazy(fresh):
        names = [field.name for field in dataclasses.fields(fresh) if field.init]
        for name in {*MODE_FIELDS} & {*names}:
            if held_by(fresh, name) is None:
                # What train() and eval() have set answers where the model leaves it open.
                vars(fresh)[name] = held_by(before, name)
        values = [[getattr(module, name) for name in names] for module in (before, fresh)]
        # A class that is made in a call is another one in the next.
        if type(before) is type(fresh) and len({*map(fingerprint, values)}) == 1:
            return before
        _view(before, fresh, names)
    elif type(before) is not type(fresh):
        return None
    elif not isinstance(before, LinenHolder) or before.to_nnx__module == fresh.to_nnx__module:
        return before
    else:
        linen_module = fresh.to_nnx__module
        held = vars(before).items()
        vars(fresh).update({n: x for n, x in held if n == DATA_NOTE or not is_note(n)})
        fresh.to_nnx__module = linen_module
    set_initializing([fresh], is_initializing(before))
    return fresh


def _view(before: LinenStyle, fresh: LinenStyle, fields: Collection[str]) -> None:
    """Gives a new module all that an earlier one holds besides its fields.

    What `fresh` already has takes precedence.
    """
    own = vars(fresh)
    for name, value in list(vars(before).items()):
        new = own.get(name)
        if is_note(name) or name in (NAMES, IS_SETUP):
            continue
        if not is_part(value):
            if name not in own and name not in fields:
                put(fresh, name, nnx.data(value) if is_data_attribute(before, name) else value)
        elif not is_part(new):
            put_part(fresh, name, value)
        elif isinstance(value, nnx.Module) and new is not value:
            own[name] = reused(value, new) or new
    names = names_of(fresh)
    for name, structure in names_of(before).items():
        if name not in fields and name not in names:
            set_name(fresh, name, structure)


def settle(views: Iterable[tuple[Any, Any]]) -> None:
    """Gives what submodules with other fields have created to those that stay."""
    for before, fresh in views:
        for name, value in list(vars(fresh).items()):
            held = vars(before).get(name)
            if is_note(name) or name == SCOPE or value is held:
                continue
            if isinstance(before, LinenHolder):
                # The variables of a Linen module are Variables and nested dicts of them.
                if isinstance(value, nnx.Variable | dict) and not is_own_name(name):
                    setattr(before, name, nnx.data(value))
            elif is_part(value) and (not is_part(held) or isinstance(held, PendingVariables)):
                put_part(before, name, value)
