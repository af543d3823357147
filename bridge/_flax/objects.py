"""The attributes that an NNX object keeps for NNX itself, and its flags."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
from flax import nnx
from flax.nnx.pytreelib import PytreeState
from flax.nnx.tracers import TraceState
from flax.typing import HashableMapping

from .tabulate import unmark_tabulated, without_dicts


def object_state_in_trace(noted: StaticObjectState, trace: TraceState) -> Any:
    """Such a state as an object has it; its constructor would ask JAX again which trace this is."""
    made = object.__new__(PytreeState)
    made._trace_state = trace
    made._initializing, made._is_setup = noted
    return made


class StaticObjectState(NamedTuple):
    """What an NNX object keeps for NNX itself, as a static attribute of its GraphDef."""

    initializing: bool
    is_setup: bool

    @classmethod
    def of(cls, state: Any) -> Self:
        """The same of either form."""
        return cls(state.initializing, state.is_setup)


# What every NNX object keeps for NNX itself, in either form, and which attributes it has as data.
OBJECT_STATES = PytreeState, StaticObjectState


DATA_ATTRIBUTES = HashableMapping


# The dict in a `HashableMapping`; through its public methods every item is a call of Python.
attributes_dict = operator.attrgetter("_mapping")


def graph_attributes(node: nnx.Pytree) -> list[tuple[str, Any]]:
    """An object's attributes for its GraphDef, what it keeps for NNX itself as a static one.

    `nnx.Pytree` has that as a node of its own, and asks for every attribute in Python whether it is
    data: for a small model a good part of what a call of `nnx.jit` costs.
    """
    attributes = vars(node)
    if unmark_tabulated(node):
        return list(without_dicts(graph_attributes(node)))
    is_data = attributes["_pytree__nodes"]._mapping.get
    data, static = nnx.graphlib.DataElem, nnx.graphlib.StaticElem
    state = attributes["_pytree__state"]
    noted = StaticObjectState.of(state)
    found: list[tuple[str, Any]] = []
    for name in sorted(attributes):
        value = attributes[name]
        if value is state:
            value = static(noted)
        elif not is_data(name):
            value = static(value)
        elif type(value) is not dict:
            # What a dict is Flax can tell by itself.
            value = data(value)
        found.append((name, value))
    return found


def set_graph_attributes(node: nnx.Pytree, attributes: Iterable[tuple[Any, Any]]) -> None:
    """The inverse of `graph_attributes`, for an object without attributes."""
    own = vars(node)
    own.update(attributes)
    own["_pytree__state"] = PytreeState(*own["_pytree__state"])


def is_initializing(node: nnx.Pytree) -> bool:
    """Whether `lazy_init` is running through this module.

    The flag is Flax's own, because it is part of the GraphDef: a thread-local of ours would not be
    part of the cache key of an `nnx.jit` inside the model.
    """
    return node._pytree__state.initializing


def set_initializing(nodes: Sequence[nnx.Pytree], value: bool) -> None:
    """Sets the flag that `is_initializing` reads."""
    for node in nodes:
        node._pytree__state._initializing = value


def is_data_attribute(node: nnx.Pytree, name: str) -> bool:
    """Whether an attribute is state rather than static; there is no public reader."""
    return bool(node._pytree__nodes.get(name, False))


def mark_arrays_as_data(nodes: Iterable[nnx.Pytree]) -> None:
    """Makes array attributes that are no Variables data, whatever they are while traced.

    Flax 0.12.8 tells arrays by `issubclass`, which a tracer's type fails, and then keeps the tracer
    as a static attribute. `nnx.data` at the assignment would do, but the constructors are the
    user's.
    """
    for node in nodes:
        for name, value in list(vars(node).items()):
            if isinstance(value, jax.Array) and not is_data_attribute(node, name):
                setattr(node, name, nnx.data(value))
