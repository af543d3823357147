"""Tells what `setup` makes and no module can keep: arrays, what refers to a module or Variable.

Linen runs `setup` in each call. A module that keeps its variables keeps its submodules and plain
values too. An array would have no gradient and would not follow an update, and a copy of the module
would call the one that it was copied from, as a GraphDef takes a bound method as it is. So these
belong to the call, and `setup` runs again in each call of a module that has any. A submodule that
is made with other arrays or functions in each call is then another one with the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from bridge._conversion.linen_attributes import LinenHolder, is_linen_style
from bridge._errors import InvalidModuleError
from bridge._fingerprint import Look
from bridge._flax.nodes import nodes_among, nodes_below
from bridge._flax.objects import attributes_of
from bridge._module_calls.calls import ModuleInCall

from .attributes import NAMES, Otherwise, held_by, is_part, names_of
from .containers import items_within


def is_of_call(value: object) -> bool:
    """Whether a value that `setup` has made belongs to the call; a call uses up an iterator."""
    found = Look(value).objects
    return bool(nodes_among(found)) or any(isinstance(x, jax.Array | Iterator) for x in found)


def note_fields(record: ModuleInCall, submodule: nnx.Pytree, name: str) -> None:
    """Notes whether `setup` gives a submodule arrays, or functions that refer to this call.

    Raises InvalidModuleError if a Linen layer that stays after the call has such a function.
    """
    if (
        record.call.is_kept
        and isinstance(submodule, LinenHolder)
        and _refers_to_call(record, submodule.to_nnx__module)
    ):
        raise InvalidModuleError(
            f"{type(record.module).__name__}.{name}",
            submodule.to_nnx__module,
            "a Linen layer that calls no bridge.Module",
            "a Linen layer keeps its functions as they are, and every copy of the model needs one"
            " that refers to the copy: make it a method of the class",
        )
    if not is_linen_style(type(submodule)):
        return
    pending: list[Any] = [submodule]
    for module in pending:
        for field in type(module).__dataclass_fields__:
            for _, item in items_within(held_by(module, field)):
                if is_part(item):
                    continue
                if _refers_to_call(record, item):
                    record.made[name] = submodule
                    record.call.around.append((module, field))
                elif isinstance(item, jax.Array):
                    record.made[name] = submodule
        pending += [x for x in attributes_of(module).values() if is_linen_style(type(x))]


def forget_around(module: nnx.Pytree, field: str) -> None:
    """Leaves out of a module that stays what `setup` of the module around has given it."""
    own = attributes_of(module)
    if not is_part(own.get(field)):
        own.pop(field, None)
    # Not by `set_name`, as the module may be one of a transform that has ended.
    own[NAMES] = tuple(sorted({**names_of(module), field: Otherwise.AROUND}.items()))


def _refers_to_call(record: ModuleInCall, value: object) -> bool:
    nodes = nodes_among(Look(value).objects)
    if not nodes:
        return False
    below = nodes_below(record.call.root.module)
    known = {id(node) for node in (*below.objects, *below.variables)}
    return any(id(node) in known or record.call.find(node) is not None for node in nodes)
