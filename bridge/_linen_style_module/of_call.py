"""Tells what `setup` makes and no module can keep: arrays, what refers to a module or Variable.

Linen runs `setup` in each call. A module that keeps its variables keeps its submodules and plain
values too. An array would have no gradient and would not follow an update, and a copy of the module
would call the one that it was copied from, as a GraphDef takes a bound method as it is. So these
belong to the call, and `setup` runs again in each call that reads one. A submodule that stays may
not have any in its fields.
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
from bridge._module_calls.calls import ModuleInCall

from .attributes import held_by, is_part
from .containers import items_within


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
        elif is_linen_style(kind):
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
