"""The whole state of a model before an initialisation, to be put back afterwards."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from bridge._conversion.arrays import is_taken, taken
from bridge._conversion.linen_attributes import CREATED_ATTRIBUTES, IS_SETUP
from bridge._flax.nodes import NODELESS_TYPES, Nodes, items_of, nodes_below
from bridge._flax.objects import DATA_NOTE, noted_data
from bridge._flax.variables import assign_raw_value, raw_value


class Snapshot:
    """Every attribute, item and value of a model.

    Objects, dicts and lists get their earlier contents back, and Variables their values, however a
    call has changed them.
    """

    def __init__(self, nodes: Nodes):
        self._variables: list[tuple[nnx.Variable[Any], Any, dict[str, Any]]] = []
        for variable in nodes.variables:
            value = raw_value(variable)
            value = value if isinstance(value, jax.Array) else taken(value)
            self._variables.append((variable, value, variable.get_metadata()))
        # By id: the node, its type, its attributes or items as it has them, and as they are now.
        self._nodes: dict[int, tuple[Any, type, Any, Any]] = {}
        for node in (*nodes.objects, *nodes.others):
            held = node if isinstance(node, dict | list) else getattr(node, "__dict__", None)
            if held is not None:
                self._nodes[id(node)] = node, type(node), held, held.copy()

    def is_changed(self) -> bool:
        """Whether anything but the values and the metadata of Variables has changed."""
        for node, kind, held, before in self._nodes.values():
            if type(node) is not kind or len(held) != len(before):
                return True
            # Iterating a dict gives its keys.
            if not all(map(operator.is_, held, before)):
                return True
            if not isinstance(held, list) and not all(
                map(operator.is_, held.values(), before.values())
            ):
                return True
        return False

    def has_more(self, nodes: Nodes, kind: type[nnx.Variable[Any]]) -> bool:
        """Whether there are Variables of a type among these nodes that were not there before."""
        return any(isinstance(v, kind) and id(v) not in self._known for v in nodes.variables)

    def restore(self) -> None:
        """Puts everything back."""
        for node, kind, held, before in self._nodes.values():
            fill(held, before)
            if type(node) is not kind:
                object.__setattr__(node, "__class__", kind)
        self.restore_values(())

    def keep_created(self) -> None:
        """Puts back what nodes held, and keeps the state that is new.

        State is new if there was nothing before, or something without state: an attribute, an item
        of a dict, an item at the end of a list, a None. An object that has got state this way also
        keeps its other new attributes, and the flags that it set, because they may note that it has
        built its variables. Sown values are output of the call and are not kept.
        """
        for node, kind, held, before in list(self._nodes.values()):
            if isinstance(held, list):
                fill(held, self._list(before, list(held)))
            elif held is node:
                fill(held, self._dict(before, dict(held)))
            else:
                fill(held, self._attributes(node, before, dict(held)))
            if type(node) is not kind:
                object.__setattr__(node, "__class__", kind)

    def restore_values(self, moved: Collection[int]) -> list[nnx.Variable[Any]]:
        """Puts back the metadata of Variables, and their values unless their ids are in `moved`.

        Returns the other Variables that keep their new values, because the call has donated the old
        ones to a program.
        """
        donated: list[nnx.Variable[Any]] = []
        for variable, value, metadata in self._variables:
            now = raw_value(variable)
            if now is not value and id(variable) not in moved and not is_taken(now, value):
                if is_deleted(value):
                    donated.append(variable)
                else:
                    assign_raw_value(variable, taken(value))
            if variable.get_metadata() != metadata:
                variable.set_metadata(metadata)
        return donated

    @functools.cached_property
    def _known(self) -> set[int]:
        """The ids of the Variables and arrays that were there, wherever they are now."""
        held = [
            item
            for _, _, _, before in self._nodes.values()
            for item in (before if isinstance(before, list) else before.values())
            if type(item) not in NODELESS_TYPES
        ]
        arrays = {id(item) for item in held if isinstance(item, jax.Array)}
        return arrays | {id(variable) for variable, _, _ in self._variables}

    def _combined(self, before: object, now: object) -> Any:
        """What stays where there was something before."""
        if now is before:
            return before
        if type(before) is dict and type(now) is dict:
            *_, contents = self._nodes.get(id(before), (dict(before),))
            combined = self._dict(contents, now)
            if combined.keys() != before.keys() or any(
                combined[key] is not before[key] for key in combined
            ):
                return combined
            return before
        return now if self._is_new(now) and not _holds_state(before, ()) else before

    def _is_new(self, value: object) -> bool:
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
        self, node: object, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> dict[str, Any]:
        kept = self._dict({k: v for k, v in before.items() if k != DATA_NOTE}, now)
        made = {k for k, v in kept.items() if k not in before or v is not before[k]}
        if made or (now.get(IS_SETUP) and not before.get(IS_SETUP)):
            new = {k: v for k, v in now.items() if k not in before and not is_sown(v)}
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
    """Removes sown values: they are outputs of a call, not state of the model."""
    # `nodes` has the Variables of all attributes, and there are fewer of them than of these.
    if not any(map(is_sown, nodes.variables)):
        return
    for node in nodes.objects:
        for name, value in list(vars(node).items()):
            if is_sown(value) or _is_emptied(value):
                delattr(node, name)


def _is_emptied(value: object) -> bool:
    """The same for nested dicts; whether nothing is left in one that held something."""
    if type(value) is not dict:
        return False
    tree: dict[Any, Any] = value
    gone = [key for key, item in tree.items() if is_sown(item) or _is_emptied(item)]
    for key in gone:
        del tree[key]
    return bool(gone) and not tree


def is_deleted(value: object) -> bool:
    """Whether a program that was given an array, or one in a container, has taken its buffer."""
    arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    # Neither a tracer nor a reference tells.
    return any(not isinstance(x, Tracer | jax.Ref) and x.is_deleted() for x in arrays)


def fill(held: list[Any] | dict[Any, Any], contents: list[Any] | dict[Any, Any]) -> None:
    """Makes a list or a dict hold these contents and no others."""
    held.clear()
    if isinstance(held, list):
        held.extend(contents)
    else:
        held.update(contents)


def _holds_state(value: object, known: Collection[int]) -> bool:
    """Whether there are Variables or arrays in a value, besides those whose ids are known.

    Sown Variables do not count.
    """
    if isinstance(value, jax.Array):
        return id(value) not in known
    if isinstance(value, nnx.Variable):
        return not is_sown(value) and id(value) not in known
    nodes = nodes_below(value)
    if any(_holds_state(variable, known) for variable in nodes.variables):
        return True
    held = [*(vars(node).values() for node in nodes.objects), *map(items_of, nodes.others)]
    arrays = (x for items in held for x in items or () if isinstance(x, jax.Array))
    return any(id(x) not in known for x in arrays)


def is_sown(value: object) -> bool:
    """Whether a value is a Variable of a type that calls sow."""
    # Cheap test first: a failing `isinstance(value, nnx.Variable)` is slow.
    if type(value) in NODELESS_TYPES or not isinstance(value, nnx.Variable):
        return False
    # Perturbations derive from it, and `init` makes them too.
    kind = value.var_type
    return issubclass(kind, nnx.Intermediate) and not issubclass(kind, nnx.Perturbation)
