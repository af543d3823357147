"""How a submodule gets its place: a new one, or the one of an earlier call with other fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, TypeGuard

from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.linen_attributes import LinenHolder, is_linen_style
from bridge._errors import NameInUseError
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import (
    DATA_NOTE,
    attributes_of,
    is_initializing,
    is_note,
    set_initializing,
)
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._module_calls.calls import LinenStyle, ModuleInCall
from bridge._module_calls.scope import is_of_linen
from bridge._train_eval import MODE_FIELDS

from .attributes import (
    IS_SETUP,
    MODES,
    NAMES,
    PRIORITIES,
    SCOPE,
    AttrPriority,
    OfCall,
    Ref,
    drop_name,
    has_room,
    is_part,
    names_of,
    priorities_of,
    put,
    put_part,
    refs,
    set_name,
    set_priority,
)
from .given import claim
from .of_call import hold_fields
from .variables import Unclaimed, is_vacant

# (record of a module, name) of attributes that refer to a submodule of another module.
References: TypeAlias = list[tuple[ModuleInCall, str]]

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), Ref, OfCall)


def auto_name(record: ModuleInCall, kind: type) -> str:
    """Linen's name for the next submodule of a class."""
    index = record.type_counter[kind.__name__]
    record.type_counter[kind.__name__] += 1
    return f"{kind.__name__}_{index}"


def reserve(record: ModuleInCall, name: str, collection: str | None, what: str) -> None:
    """Takes a name of a module; a variable shares it only with those of other collections.

    Raises:
      NameInUseError: it is taken.
    """
    taken = record.reserved.setdefault(name, set())
    is_taken = None in taken or collection in taken or (collection is None and taken)
    if is_taken or (not record.in_setup and _is_of_field(record.module, name)):
        raise NameInUseError(what, name, type(record.module).__name__)
    taken.add(collection)


def _is_of_field(module: LinenStyle, name: str) -> bool:
    """Whether a submodule that a field holds lives in the attribute of this name."""
    names, fields = names_of(module), type(module).__dataclass_fields__
    if name in fields and name not in names:
        return is_part(attributes_of(module).get(name))
    return any(name in refs(structure) for n, structure in names.items() if n in fields)


def place_submodule(
    record: ModuleInCall, name: str, submodule: nnx.Module, *, is_assigned: bool = False
) -> Any:
    """Gives a submodule its place in a module that is being called.

    Args:
      record: the module.
      name: the submodule's name.
      submodule: any NNX module.
      is_assigned: whether the model has set the attribute of that name to it.

    Returns:
      The module at that place: this one, or the one of an earlier call if its fields are the same.

    Raises:
      NameInUseError: something else has the name.
    """
    if record.is_declaring:
        reserve(record, name, None, "submodule")
    if record.in_setup:
        hold_fields(record, submodule, name)
    module = record.module
    before = attributes_of(module).get(name)
    if before is submodule:
        if is_assigned:
            drop_name(module, name)
        return submodule
    placed = submodule
    if isinstance(before, nnx.Pytree) and not isinstance(before, Unclaimed):
        placed = reused(before, submodule)
        if placed is not submodule and placed is not before:
            raise NameInUseError("submodule", name, type(module).__name__)
        if placed is submodule:
            record.views.append((before, submodule))
    else:
        if isinstance(before, Unclaimed):
            claim(submodule, before, f"{type(module).__name__}/{name}")
        elif is_vacant(before):
            delattr(module, name)
        elif not has_room(module, name):
            raise NameInUseError("submodule", name, type(module).__name__)
        put_part(module, name, submodule, is_assigned=is_assigned)
        if modes := dict(getattr(module, MODES)):
            for node in nodes_below(submodule).objects:
                set_modes(node, modes)
    if is_assigned:
        drop_name(module, name)
    adopt_submodule(record, name, placed)
    return placed


def is_mode(module: LinenStyle, name: str) -> bool:
    """Whether NNX sets an attribute of a module for what a later call makes, and not for itself."""
    is_own = name in vars(module) or name in names_of(module) or hasattr(type(module), name)
    return name in MODE_FIELDS and not is_own and name not in type(module).__dataclass_fields__


def set_modes(node: nnx.Pytree, modes: Mapping[str, Any]) -> None:
    """Sets modes on one node, as `train()` and `eval()` do; what a field says stays.

    Args:
      node: an NNX module, or another node.
      modes: value by name.
    """
    for name, value in modes.items():
        if is_lazy(node) and is_mode(node, name):
            put(node, MODES, tuple(sorted({**dict(getattr(node, MODES)), name: value}.items())))
        elif is_lazy(node):
            if getattr(node, name) is None:
                vars(node)[name] = value
        elif isinstance(node, nnx.Module) and hasattr(node, name):
            setattr(node, name, value)


def adopt_submodule(
    record: ModuleInCall, name: str, submodule: nnx.Module, references: References | None = None
) -> None:
    """Makes a submodule part of the call that its parent is part of.

    Args:
      record: the parent.
      name: the submodule's name there.
      submodule: any NNX module.
      references: as for `adopt_fields`.
    """
    own(record, name, submodule)
    found = record.call.find(submodule)
    if found is not None:
        adopt_fields(found, references)
    elif is_initializing(record.module):
        if isinstance(submodule, LinenHolder) and submodule.to_nnx__rngs is None:
            _give_keys(submodule, record.rngs)
        set_initializing(nodes_below(submodule).objects, True)


def own(record: ModuleInCall, name: str, submodule: nnx.Module) -> bool:
    """Makes a module the owner of a submodule, unless the submodule has one.

    Args:
      record: the module.
      name: the submodule's name there.
      submodule: any NNX module.

    Returns:
      Whether the module is the owner, and the name that of the submodule.
    """
    call, path = record.call, (*record.path, name)
    if isinstance(submodule, LinenHolder):
        return call.owner_of(submodule, path)[1] == path
    if not is_lazy(submodule):
        return True
    found = call.find(submodule)
    if found is None:
        found = call.attach(submodule, record, name)
    elif not found.is_owned:
        found.is_owned, found.parent, found.path = True, record, path
    return found.path == path


def adopt_fields(record: ModuleInCall, references: References | None = None) -> None:
    """Makes the submodules that a module has part of its call.

    Args:
      record: the module.
      references: gets the attributes that are known to refer to what another module has, which has
        to come first. By default they come after all others below this module.
    """
    later: References = [] if references is None else references
    held = attributes_of(record.module)
    order = list(_in_order(record.module) if is_initializing(record.module) else held)
    if PRIORITIES in held:
        priorities = priorities_of(record.module)
        order.sort(key=lambda name: priorities.get(name, AttrPriority.DEFAULT))
        later += ((record, name) for name in order if priorities.get(name) == AttrPriority.LOW)
        order = [name for name in order if priorities.get(name) != AttrPriority.LOW]
    for name in order:
        _adopt_attribute(record, name, later)
    if references is None:
        # Adopting one may add others.
        for each, name in later:
            _adopt_attribute(each, name, later)


def _adopt_attribute(record: ModuleInCall, name: str, references: References) -> None:
    held = attributes_of(record.module)
    value = held.get(name)
    if isinstance(value, LinenHolder):
        first, _ = record.call.owner_of(value, (*record.path, name))
        if first is not value and not any(
            isinstance(x, nnx.Variable | dict) for x in vars(value).values()
        ):
            # Linen knows a module that is in two places as one.
            held[name] = value = first
    elif not is_lazy(value):
        return
    if own(record, name, value):
        adopt_submodule(record, name, value, references)
    else:
        refer(record.module, name)


def _in_order(module: LinenStyle) -> dict[str, None]:
    """The names of attributes, those that fields hold in the order of the fields.

    Keys are drawn in this order. That of the attributes is another one in a copy.
    """
    own, names = attributes_of(module), names_of(module)
    order: dict[str, None] = {}
    for field in type(module).__dataclass_fields__:
        held = (field, *refs(names.get(field)))
        order |= dict.fromkeys(name for name in held if name in own)
    return order | dict.fromkeys(own)


def refer(module: LinenStyle, name: str) -> None:
    """Notes that an attribute refers to a submodule of another module, which owns it."""
    if name not in priorities_of(module):
        set_priority(module, name, AttrPriority.LOW)


def is_lazy(value: object) -> TypeGuard[LinenStyle]:
    """Whether a value is a `bridge.Module`; its class is in a room above."""
    return is_linen_style(type(value))


def wrapped(linen_module: nn.Module, record: ModuleInCall | None) -> ToNNX:
    """A Linen module as a submodule."""
    module = ToNNX(linen_module)
    if record is not None:
        _give_keys(module, record.rngs)
    return module


def _give_keys(module: LinenHolder, rngs: nnx.Rngs) -> None:
    """Gives a Linen module streams of its own, named as Linen would have named them."""
    if len(rngs):
        streams = rngs.fork()
        if is_of_linen(rngs) and "default" in streams and "params" not in streams:
            named = {"params" if n == "default" else n: s for n, s in streams.items()}
            streams = nnx.Rngs(**named)
        module.to_nnx__rngs = streams


def reused(before: nnx.Pytree, fresh: Any) -> Any:
    """The submodule of an earlier call in the place of one that was just made.

    A compact method makes its submodules anew at each call. Variables stay where they are, so a
    call that changes nothing writes nothing, and other references to a submodule stay valid.

    Args:
      before: the one that holds the variables.
      fresh: the one with the fields of this call.

    Returns:
      `before` if its fields are the same, else `fresh` with the variables of `before`.
    """
    if type(before) is not type(fresh):
        # A class that is made in a call is another one in the next.
        if not (is_lazy(before) and is_lazy(fresh)):
            return None
        view(before, fresh, [field.name for field in dataclasses.fields(fresh) if field.init])
        return fresh
    if isinstance(before, LinenHolder):
        if before.to_nnx__module == fresh.to_nnx__module:
            return before
        linen_module = fresh.to_nnx__module
        view(before, fresh, ())
        fresh.to_nnx__module = linen_module
        return fresh
    if not is_lazy(before):
        return before
    names = [field.name for field in dataclasses.fields(before) if field.init]
    if all(_is_same(before, fresh, name) for name in names):
        return before
    view(before, fresh, names)
    return fresh


def _is_same(before: LinenStyle, fresh: LinenStyle, name: str) -> bool:
    """Whether a field is as it was; a module in it is taken over from the earlier call."""
    old, new = _held(before, name), _held(fresh, name)
    if new is None and name in MODE_FIELDS:
        # What train() and eval() have set answers where the model leaves it open.
        vars(fresh)[name] = old
        return True
    if not _is_equal(old, new):
        return _is_same_part(before, fresh, name)
    return all(_is_same_part(before, fresh, part) for part in refs(new))


def _held(module: LinenStyle, name: str) -> Any:
    """What a field holds: a value, a part, or a structure with names of parts."""
    return names_of(module).get(name, attributes_of(module).get(name))


def _is_same_part(before: LinenStyle, fresh: LinenStyle, name: str) -> bool:
    old, new = attributes_of(before).get(name), attributes_of(fresh).get(name)
    if isinstance(old, nnx.Module) and isinstance(new, nnx.Module) and old is not new:
        kept = reused(old, new)
        if kept is not None:
            vars(fresh)[name] = new = kept
    return _is_equal(old, new)


def _is_equal(a: object, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, FrozenDict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    return isinstance(a, _SIMPLE) and a == b


def view(before: nnx.Module, fresh: nnx.Module, fields: Collection[str]) -> None:
    """Gives a new module all that an earlier one holds besides its fields."""
    own, held = vars(fresh), vars(before)
    note = dict(held[DATA_NOTE]) if DATA_NOTE in held else {}
    names = {n: structure for n, structure in names_of(before).items() if n not in fields}
    # A part may live in the attribute of a field.
    hidden = [n for n in fields if n in names_of(before) and is_part(held.get(n))]
    names |= {n: own[n] for n in hidden if n in own} | names_of(fresh)
    parts = {part for structure in names_of(fresh).values() for part in refs(structure)}
    kept = {*fields, IS_SETUP, NAMES} - {*hidden} | parts
    for name, value in held.items():
        if is_note(name) or (name in kept and name not in parts):
            continue
        new = own.get(name)
        if isinstance(new, nnx.Module) and isinstance(value, nnx.Module) and new is not value:
            own[name] = reused(value, new) or new
        elif name not in parts or new is None:
            own[name] = value
    own[DATA_NOTE] = own[DATA_NOTE].update({n: d for n, d in note.items() if n not in kept})
    for name, structure in names.items():
        set_name(fresh, name, structure)
    set_initializing([fresh], is_initializing(before))


def settle(record: ModuleInCall) -> None:
    """Gives what a submodule with other fields has created to the one that stays."""
    for before, fresh in record.views:
        held = vars(before)
        for name, value in list(vars(fresh).items()):
            is_state = isinstance(value, nnx.Variable | nnx.Pytree)
            if not is_part(held.get(name)) and is_state and not is_note(name) and name != SCOPE:
                put_part(before, name, value)
        for name, structure in names_of(fresh).items():
            if name not in names_of(before) and name not in held:
                set_name(before, name, structure)
        if PRIORITIES in vars(fresh) and PRIORITIES not in held:
            put(before, PRIORITIES, vars(fresh)[PRIORITIES])
        if is_lazy(before) and vars(fresh)[IS_SETUP] and not held[IS_SETUP]:
            held[IS_SETUP] = vars(fresh)[IS_SETUP]
    record.views.clear()
