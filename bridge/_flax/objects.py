"""The attributes that an NNX object keeps for NNX itself, and its flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from .promises import part, required

_PREFIX = "_pytree__"

# What every NNX object keeps for NNX itself, and which of its attributes are data.
ObjectState = part(
    "flax.nnx.pytreelib", "PytreeState", lambda cls: cls(True, False).initializing is True
)
DATA_ATTRIBUTES = part(
    "flax.typing", "HashableMapping", lambda cls: cls({"a": 1}, copy=False)["a"] == 1
)
# The attributes in which it does.
STATE = "_pytree__state"
DATA_NOTE = "_pytree__nodes"
PYTREE_NOTES = frozenset({STATE, DATA_NOTE})
# Where `nnx.capture` puts the Variables that `sow` fills, on each module for the time of a call.
CAPTURES = "__captures__"


def state_flags(node: nnx.Pytree) -> tuple[bool, bool] | None:
    """The flags in what an object keeps for NNX itself: `initializing` and `is_setup`."""
    state = vars(node).get(STATE)
    return None if state is None else (state.initializing, state.is_setup)


# `vars` asks the `__getattribute__` of the class, if there is one.
attributes_of: Callable[[nnx.Pytree], dict[str, Any]] = vars(nnx.Pytree)["__dict__"].__get__


def is_note(name: str) -> bool:
    """Whether an attribute is NNX's own: `nnx.iter_graph` and `vars` show it beside the others."""
    return name.startswith(_PREFIX)


def _has_flag() -> bool:
    """An object's state has a flag that says whether the object is being initialised."""
    state = vars(nnx.Module())[STATE]
    before = state.initializing
    state._initializing = True
    return type(state) is ObjectState and before is False and state.initializing is True


def _has_data_note() -> bool:
    """An object notes for each attribute whether it is data."""
    module: Any = nnx.Module()
    module.static, module.data = 1, nnx.data(2)
    note = vars(module)[DATA_NOTE]
    is_noted = type(note) is DATA_ATTRIBUTES and note["data"] is True and note["static"] is False
    return is_noted and note.update({"more": True})["more"] is True


_needs_flag = required("nnx.Pytree._pytree__state", _has_flag)
_needs_data_note = required("nnx.Pytree._pytree__nodes", _has_data_note)


@_needs_flag
def is_initializing(node: nnx.Pytree) -> bool:
    """Whether `lazy_init` is running through this module.

    The flag is Flax's own, so that its bridge and this one initialise each other's wrappers. It is
    part of the GraphDef, and so of the cache key of an `nnx.jit` inside the model; a thread-local
    would not be.
    """
    return vars(node)[STATE].initializing


@_needs_flag
def set_initializing(nodes: Sequence[nnx.Pytree], value: bool) -> None:
    """Sets the flag that `is_initializing` reads."""
    for node in nodes:
        vars(node)[STATE]._initializing = value


@_needs_data_note
def is_data_attribute(node: nnx.Pytree, name: str) -> bool:
    """Whether an attribute is state rather than static; there is no public reader."""
    return bool(vars(node)[DATA_NOTE].get(name, False))


@_needs_data_note
def noted_data(
    before: Mapping[str, Any], now: Mapping[str, Any], made: Collection[str]
) -> dict[str, Any]:
    """The note about what is data for an object that keeps some attributes of a call.

    Assigning each attribute again would work, but runs the `__setattr__` of the user's class.
    `made` has the names of the attributes that are kept from the call. Returns the attribute with
    the note, or {} for a node that has none.
    """
    if DATA_NOTE not in before:
        return {}
    kept = {name: is_data for name, is_data in before[DATA_NOTE].items() if name not in made}
    if made and DATA_NOTE in now:
        kept |= {name: is_data for name, is_data in now[DATA_NOTE].items() if name in made}
    return {DATA_NOTE: DATA_ATTRIBUTES(kept, copy=False)}


def mark_arrays_as_data(nodes: Iterable[nnx.Pytree]) -> None:
    """Makes array attributes that are not Variables data, whatever they are while traced.

    Flax 0.12.8 recognises arrays by `issubclass`, which fails for a tracer's type, and then keeps
    the tracer as a static attribute. `nnx.data` at the assignment would help, but users write the
    constructors.
    """
    for node in nodes:
        for name, value in list(vars(node).items()):
            if isinstance(value, jax.Array) and not is_data_attribute(node, name):
                setattr(node, name, nnx.data(value))
