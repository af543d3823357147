"""Gives what a module assigns or makes its place: a new one, or that of an earlier call.

Linen runs `setup` in each call. A module that keeps its variables keeps its submodules and plain
values too. An array would have no gradient and would not follow an update, and a copy of the module
would call the one that it was copied from, as a GraphDef takes a bound method as it is. So these
belong to the call, and `setup` runs again in each call that reads one. A submodule that stays may
not have any in its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeGuard

import jax
from flax import linen as nn
from flax import nnx

from bridge._conversion.linen_attributes import LinenHolder, LinenStyle, is_own_name
from bridge._errors import InvalidModuleError, NameInUseError
from bridge._fingerprint import Look, fingerprint
from bridge._flax.nodes import nodes_among, nodes_below
from bridge._flax.objects import (
    DATA_NOTE,
    attributes_of,
    is_data_attribute,
    is_initializing,
    is_note,
    set_initializing,
)
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._module_calls import ModuleInCall, is_of_linen, joined_record
from bridge._train_eval import MODE_FIELDS
from bridge._types import Variable

from .attributes import (
    IS_SETUP,
    NAMES,
    REPLACED,
    SCOPE,
    AttrPriority,
    Ref,
    drop_name,
    has_room,
    held_by,
    is_part,
    is_property,
    is_reserved_name,
    names_of,
    priorities_of,
    put,
    put_part,
    put_plain,
    refs,
    set_name,
    set_priority,
    stand_in,
    value_ref,
)
from .containers import items_within, mapped
from .variables import claim, is_vacant


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
        if isinstance(item, LinenStyle) and isinstance(held, LinenStyle):
            # What `setup` makes may call it.
            own(record, key, held)
            record.call.replace(item, held)
        elif not _is_part(item) and is_of_call(item):
            record.made[value_ref(key).name] = item


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
            ref = value_ref(key)
            vars(module).pop(ref.name, None)
            record.made[ref.name] = item
            return ref
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
        elif isinstance(vars(module).get(name), nnx.Module | dict):
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


def is_of_call(value: object) -> bool:
    """Whether a value that `setup` has made belongs to the call; a call uses up an iterator."""
    found = Look(value).objects
    return bool(nodes_among(found)) or any(isinstance(x, jax.Array | Iterator) for x in found)


def check_fields(record: ModuleInCall, submodule: nnx.Pytree, name: str) -> None:
    """Checks the fields of a submodule that `setup` makes and that stays after the call.

    Raises InvalidModuleError if there is an array, or a function that refers to a module.
    """
    call = record.call
    if not (record.in_setup and call.is_kept):
        return
    for node in nodes_below(submodule).objects:
        if node is not submodule and call.find(node) is not None:
            continue
        held: list[Any] = []
        kind: Any = type(node)
        if isinstance(node, LinenHolder):
            held = [node.to_nnx__module]
        elif isinstance(node, LinenStyle):
            fields = [held_by(node, field) for field in kind.__dataclass_fields__]
            held = [x for field in fields for _, x in items_within(field) if not is_part(x)]
        if any(isinstance(x, jax.Array) or nodes_among(Look(x).objects) for x in held):
            raise InvalidModuleError(
                f"{type(record.module).__name__}.{name}",
                getattr(node, "to_nnx__module", node),
                "a submodule that has no arrays and no functions of a module in its fields",
                "every copy of the model needs its own: make a constant a NumPy array, a function a"
                " method of the class, and the submodule in a compact method; or pass them when it"
                " is called",
            )


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
    if isinstance(before, nnx.Pytree):
        placed = reused(before, submodule)
        if placed is None:
            raise NameInUseError("submodule", name, type(module).__name__)
        if placed is submodule:
            record.views.append((before, submodule))
            if record.in_setup:
                # Only a view has a part before its `setup` has run.
                attributes_of(module)[name] = submodule
    else:
        if isinstance(before, dict):
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
            if not isinstance(node, LinenStyle):
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
    if not isinstance(submodule, LinenStyle):
        return True
    found = call.find(submodule)
    if found is None:
        found = call.attach(submodule, record, name)
    elif not found.is_owned:
        found.is_owned, found.path = True, path
    return found.path == path


def join_call(record: ModuleInCall, name: str, submodule: nnx.Module) -> None:
    """Makes a submodule, with all that is below it, part of the call that its parent is part of.

    It becomes a reference if another module is its owner.
    """
    if not own(record, name, submodule):
        refer(record.module, name)
        return
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
        join_call(record, name, value)


def _own_submodules(module: LinenStyle) -> list[str]:
    """The attributes with submodules that are no references: fields first, in their order.

    Keys are drawn in this order. A copy has its attributes in another order.
    """
    held, names, priorities = attributes_of(module), names_of(module), priorities_of(module)
    fields = [n for f in type(module).__dataclass_fields__ for n in (f, *refs(names.get(f)))]
    return [
        name
        for name in dict.fromkeys((*fields, *held))
        if (isinstance(held.get(name), LinenHolder | LinenStyle))
        and priorities.get(name) != AttrPriority.LOW
    ]


def refer(module: LinenStyle, name: str) -> None:
    """Notes that an attribute refers to a submodule of another module, which owns it."""
    if name not in priorities_of(module):
        set_priority(module, name, AttrPriority.LOW)


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
    if isinstance(before, LinenStyle) and isinstance(fresh, LinenStyle):
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
            elif is_part(value) and (not is_part(held) or isinstance(held, dict)):
                put_part(before, name, value)
