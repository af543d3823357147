"""Layers that stay Linen, in a `bridge.ToNNX`."""

from __future__ import annotations

from collections.abc import Collection

from bridge._layers.table import layer_of_linen

from ._layers import Layer
from ._method import Method
from ._plans import ClassPlan, Slot
from ._refusals import Refusal, refused


def is_named_by_others(cls: type) -> bool:
    """Whether only the module around a layer and the layer in it knows the variables' names."""
    row = layer_of_linen(cls)
    return row is not None and row.kept_by_path is not None


def why_linen(plan: ClassPlan | None, cls: type) -> Refusal:
    """Why a class stays Linen at a place."""
    if plan is None and not cls.__module__.startswith("flax."):
        return refused("class-elsewhere", name=cls.__name__, module=cls.__module__)
    if plan is None:
        return refused("no-counterpart", name=cls.__name__)
    if plan.refusal is None:
        return refused("lifted-class", name=cls.__name__)
    return refused("class-left", name=cls.__name__)


def kept(method: Method, slot: Slot, refusal: Refusal, without: Collection[str] = ()) -> str:
    """The Linen layer in a wrapper.

    `without` has names of arguments that moved to the calls.
    """
    slot.linen, slot.cache = refusal, None
    return f"bridge.ToNNX({method.linen_text(slot.node, without)}, rngs=rngs)"


def has_variables(plan: ClassPlan, slot: Slot) -> bool:
    """Whether an argument of a layer is a local variable that holds a module."""
    return any(each.outer is slot and each.variable for each in plan.slots.values())


def kept_layer(method: Method, slot: Slot, refusal: Refusal, layer: Layer | None) -> str:
    """One of Flax's layers in a wrapper; modes that only the call knows move to its calls."""
    modes = {
        each.arg: each.value
        for each in slot.constructor.keywords
        if layer is not None and each.arg in layer.modes and method.taint.touches(each)
    }
    slot.modes = {str(name): method.call_text(node) for name, node in modes.items()}
    return kept(method, slot, refusal, slot.modes)
