"""Moves into a model what the initialisation of its copy has created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from bridge._conversion import linen_attributes
from bridge._conversion.linen_attributes import CREATED_ATTRIBUTES, LinenHolder, is_linen_style
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import is_data_attribute, set_past_class
from bridge._flax.variables import assign_raw_value, raw_value

from .snapshot import is_deleted

# NNX keeps these of an object for itself.
_OF_NNX = "_pytree__"


def adopt(module: nnx.Module, made: nnx.Module) -> None:
    """Gives a model the state that its initialised copy has and it lacks.

    What the model has stays the same object with the same value. As in the copy, state is new where
    there was nothing, or None; the flags of an object that has got state are those of the copy.

    Args:
      module: the model.
      made: its copy, in which every object is where it is in the model.
    """
    copies = dict(nnx.iter_graph(made, graph=True))
    pairs = [
        (node, copy)
        for path, node in nnx.iter_graph(module, graph=True)
        if type(copy := copies[path] if path in copies else _at(made, path)) is type(node)
    ]
    originals = {id(copy): node for node, copy in pairs}
    for node, copy in pairs:
        if isinstance(node, LinenHolder):
            _adopt_variables(node, copy)
        elif isinstance(node, nnx.Variable):
            if is_deleted(raw_value(node)):
                # The call has donated it, and as in a concrete call its new value stays.
                assign_raw_value(node, raw_value(copy))
        elif isinstance(node, nnx.Pytree):
            _adopt_attributes(node, copy, originals)
        elif isinstance(node, dict):
            new = {k: v for k, v in copy.items() if node.get(k) is None and v is not None}
            node.update({k: _original(v, originals) for k, v in new.items()})
        elif isinstance(node, list):
            node[:] = [
                _original(new, originals) if old is None else old
                for old, new in zip(node, copy, strict=False)
            ] + [_original(new, originals) for new in copy[len(node) :]]


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    """What is at a path, None if nothing is.

    A node has one path in the graph. That of a copy is another one if a new submodule that refers
    to it comes first.
    """
    for key in path:
        if isinstance(node, nnx.Pytree):
            node = vars(node).get(str(key))
        else:
            node = node.get(key) if isinstance(node, dict) else None
    return node


def _adopt_variables(node: LinenHolder, copy: LinenHolder) -> None:
    """Takes over the Linen variables of an initialised copy that the original lacks."""
    if node.to_nnx__rngs is None and copy.to_nnx__rngs is not None:
        # The bridge.Module around it has given it keys.
        node.to_nnx__rngs = copy.to_nnx__rngs
    for count, made_count in zip(node.stream_counts(), copy.stream_counts(), strict=True):
        assign_raw_value(count, raw_value(made_count))
    new = {a: entry.leaf for a, entry in linen_attributes.held_variables(copy).items()}
    linen_attributes.store(node, new, linen_attributes.held_variables(node), update=False)
    linen_attributes.note_collections(node, copy.to_nnx__collections)
    if copy.to_nnx__graphdefs:
        node.to_nnx__graphdefs = copy.to_nnx__graphdefs


def _adopt_attributes(node: nnx.Pytree, copy: nnx.Pytree, originals: dict[int, Any]) -> None:
    own, made = vars(node), dict(vars(copy))
    if is_linen_style(type(node)):
        # A part may live where the class has a field or a property of its name.
        for name in [n for n, x in made.items() if n in CREATED_ATTRIBUTES or _is_part(x)]:
            value = made.pop(name)
            if name in CREATED_ATTRIBUTES:
                own[name] = value
            elif not _is_part(own.get(name)):
                set_past_class(node, name, _original(value, originals))
    for name, value in made.items():
        before = own.get(name)
        is_flag = type(before) is bool and type(value) is bool
        is_length = isinstance(node, nnx.List) and type(before) is int
        is_new = before is None and (value is not None or name not in own)
        if name.startswith(_OF_NNX) or not (is_new or is_flag or is_length):
            continue
        # The public reader knows a module without state as no data.
        is_data = nnx.is_data(value) or is_data_attribute(copy, name)
        mark: Callable[[Any], Any] = nnx.data if is_data else nnx.static
        if before is not value or name not in own:
            setattr(node, name, mark(_original(value, originals)))


def _is_part(value: object) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _original(value: object, originals: dict[int, Any]) -> Any:
    """A value of the copy, with the model's own objects in it."""
    if id(value) in originals:
        return originals[id(value)]
    for node in nodes_below(value).objects:
        attributes = vars(node)
        attributes.update({n: originals.get(id(v), v) for n, v in attributes.items()})
    return value
