"""The whole state of a model before an initialisation, to be put back afterwards."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import nnx

from bridge._conversion.arrays import is_taken, taken
from bridge._conversion.linen_attributes import CREATED_ATTRIBUTES, IS_SETUP
from bridge._flax.nodes import NODELESS_TYPES, Nodes, items_of, nodes_below
from bridge._flax.objects import DATA_NOTE, noted_data
from bridge._flax.variables import assign_raw_value, raw_value


class Snapshot:
    """Every attribute, item and value of a model.

    Objects, dicts and lists are put back to what they were and held, Variables to their values, so
    it does not matter how a call has changed them.

    Args:
      nodes: the nodes of the model.
    """

    def __init__(self, nodes: Nodes):
        self._types = [(node, type(node)) for node in nodes.objects]
        self._variables = [(v, taken(raw_value(v)), v.get_metadata()) for v in nodes.variables]
        # Anything with one of these ids existed before, even if it has moved.
        self._known = {id(variable) for variable in nodes.variables}
        self._contents = {
            id(node): (node, contents)
            for node in (*nodes.objects, *nodes.others)
            if (contents := _contents(node)) is not None
        }
        held = [
            item
            for _, contents in self._contents.values()
            for item in (contents if isinstance(contents, list) else contents.values())
            if type(item) not in NODELESS_TYPES
        ]
        self._known.update(id(item) for item in held if isinstance(item, jax.Array))

    def changed(self) -> set[int]:
        """The ids of the Variables that have other values now."""
        return {id(v) for v, value, _ in self._variables if not is_taken(raw_value(v), value)}

    def has_more(self, nodes: Nodes, kind: type[nnx.Variable[Any]]) -> bool:
        """Whether there are Variables of a type among these nodes that were not there before."""
        return any(isinstance(v, kind) and id(v) not in self._known for v in nodes.variables)

    def restore(self) -> None:
        """Puts everything back."""
        for node, contents in self._contents.values():
            _fill(node, contents)
        self._restore_types()
        self._restore_variables(())

    def keep_created(self, moved: Collection[int]) -> None:
        """Puts back what was there, and keeps the state that is new.

        State is new where there was nothing, or something without state: an attribute, an item of a
        dict, an item at the end of a list, a None. An object that has got state so keeps its other
        new attributes, and the flags that it set: it may note in them that it has built its
        variables. What was sown is the output of the call and is not kept.

        Args:
          moved: the ids of Variables that keep their values.
        """
        for node, contents in list(self._contents.values()):
            # Most nodes: a call writes into Variables, and those are put back below.
            if _holds_still(node, contents):
                continue
            if isinstance(node, dict):
                _fill(node, self._dict(contents, dict(node)))
            elif isinstance(node, list):
                _fill(node, self._list(contents, list(node)))
            else:
                _fill(node, self._attributes(node, contents, dict(vars(node))))
        self._restore_types()
        self._restore_variables(moved)

    def _restore_types(self) -> None:
        for node, kind in self._types:
            if type(node) is not kind:
                object.__setattr__(node, "__class__", kind)

    def _restore_variables(self, moved: Collection[int]) -> None:
        for variable, value, metadata in self._variables:
            if id(variable) not in moved and not is_taken(raw_value(variable), value):
                assign_raw_value(variable, taken(value))
            if variable.get_metadata() != metadata:
                variable.set_metadata(metadata)

    def _combined(self, before: Any, now: Any) -> Any:
        """What stays where there was something before."""
        if now is before:
            return before
        if type(before) is dict and type(now) is dict:
            contents = self._contents.get(id(before))
            combined = self._dict(dict(before) if contents is None else contents[1], now)
            if combined.keys() != before.keys() or any(
                combined[key] is not before[key] for key in combined
            ):
                return combined
            return before
        return now if self._is_new(now) and not _holds_state(before, ()) else before

    def _is_new(self, value: Any) -> bool:
        return _holds_state(value, self._known)

    def _dict(self, before: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
        kept = {k: self._combined(old, now[k]) if k in now else old for k, old in before.items()}
        new = {k: v for k, v in now.items() if k not in before and self._is_new(v)}
        return {**kept, **new}

    def _list(self, before: list[Any], now: list[Any]) -> list[Any]:
        # If state has moved, it may now be where a None was, and is not new.
        is_moved = len(now) < len(before) or any(
            old is not new and type(old) is not dict and _holds_state(old, ())
            for old, new in zip(before, now, strict=False)
        )
        kept = (
            list(before)
            if is_moved
            else [self._combined(old, new) for old, new in zip(before, now, strict=False)]
        )
        new = [item for item in now[len(before) :] if self._is_new(item)]
        return kept + before[len(kept) :] + new

    def _attributes(
        self, node: Any, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> dict[str, Any]:
        kept = self._dict({k: v for k, v in before.items() if k != DATA_NOTE}, now)
        made = {k for k, v in kept.items() if k not in before or v is not before[k]}
        if made or (now.get(IS_SETUP) and not before.get(IS_SETUP)):
            new = {k: v for k, v in now.items() if k not in before and not _is_intermediate(v)}
            flags = {
                k: now[k]
                for k, old in before.items()
                if isinstance(old, bool) and isinstance(now.get(k), bool)
            }
            kept |= new | flags
            made |= new.keys()
        kept |= {k: now[k] for k in CREATED_ATTRIBUTES if k in now}
        if isinstance(node, nnx.List):
            kept["_length"] = sum(name.isdecimal() for name in kept)
        return kept | noted_data(before, now, made)


def drop_sown(nodes: Nodes) -> None:
    """Removes what native modules sowed: initialisation is not a call whose output counts."""
    # `nodes` has the Variables of all attributes, and there are fewer of them than of these.
    if not any(map(_is_intermediate, nodes.variables)):
        return
    for node in nodes.objects:
        for name, value in list(vars(node).items()):
            if _is_intermediate(value):
                delattr(node, name)


def _contents(node: Any) -> Any:
    """What a node holds that can be changed in place, None if nothing can."""
    if isinstance(node, dict | list):
        return node.copy()
    attributes = getattr(node, "__dict__", None)
    return None if attributes is None else dict(attributes)


def _holds_still(node: Any, contents: Any) -> bool:
    """Whether a node holds the very objects that it held, in their places."""
    held = _held(node)
    if len(held) != len(contents) or not all(map(operator.is_, held, contents)):
        return False
    # Iterating a dict gives its keys.
    return isinstance(held, list) or all(map(operator.is_, held.values(), contents.values()))


def _held(node: Any) -> Any:
    return node if isinstance(node, dict | list) else vars(node)


def _fill(node: Any, contents: Any) -> None:
    """Makes a node hold these contents and no others."""
    held = _held(node)
    held.clear()
    if isinstance(held, list):
        held.extend(contents)
    else:
        held.update(contents)


def _holds_state(value: Any, known: Collection[int]) -> bool:
    """Whether there are Variables or arrays in a value, besides those whose ids are known.

    Sown Variables do not count.
    """
    if isinstance(value, jax.Array):
        return id(value) not in known
    if isinstance(value, nnx.Variable):
        return not _is_intermediate(value) and id(value) not in known
    nodes = nodes_below(value)
    if any(_holds_state(variable, known) for variable in nodes.variables):
        return True
    held = [*map(vars, nodes.objects), *map(items_of, nodes.others)]
    arrays = (x for items in held for x in items.values() if isinstance(x, jax.Array))
    return any(id(x) not in known for x in arrays)


def _is_intermediate(value: Any) -> bool:
    # Cheap test first: a failing `isinstance(value, nnx.Variable)` is slow.
    if type(value) in NODELESS_TYPES or not isinstance(value, nnx.Variable):
        return False
    # Perturbations derive from it, and Linen's init makes them too.
    return value.var_type is nnx.Intermediate
