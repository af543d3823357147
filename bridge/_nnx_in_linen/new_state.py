"""Adds state to a module that only a call creates and that its definition lacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flax import nnx

import registry
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder
from bridge._conversion.neutral import Address, Path
from bridge._types import Variable

_ABSENT = object()


class Attached(NamedTuple):
    """A leaf that has found a place in a module: its Variable or bare array.

    `is_linen` says whether it belongs to a wrapped Linen module, which reads all of its variables.
    """

    item: Any
    is_linen: bool


def attach(module: nnx.Pytree, unknown: Mapping[Address, Any]) -> dict[Address, Attached]:
    """Puts leaves into a module where nothing is yet: no attribute, or None.

    It never adds a parameter, because the definition has even those that a call creates. Any other
    parameter is ignored, as in Linen; in the place of a None it would give a bias to a layer that
    was made without one.

    The module is changed, so it must belong to the caller. Returns each leaf that has found a
    place.
    """
    active = registry.current()
    attached: dict[Address, Attached] = {}
    # Items of a list in their order, whatever mapping they come from.
    for address in sorted(unknown, key=_list_order):
        collection, path = address
        if collection == "params" or not path:
            continue
        neutral = linen_leaves.to_leaf(collection, path, unknown[address], active)
        if collection == ARRAYS and neutral.box is None:
            item = neutral.value
        else:
            item = nnx_leaves.from_leaf(active.type_from_name(collection), neutral)
        owner = _put(module, path, item)
        if owner is not None:
            attached[address] = Attached(item, _is_wrapper(owner))
    return attached


class Reads:
    """Records which attached leaves are read, by the get hooks of Variables.

    A wrapped Linen module reads all of its variables. Variables have the hooks until `stop`.
    """

    def __init__(self, attached: Mapping[Address, Attached]):
        self.read = {address for address, (_, is_linen) in attached.items() if is_linen}
        self._hooks: list[tuple[Variable, Any]] = []
        for address, (item, is_linen) in attached.items():
            variable = item
            if is_linen or not isinstance(item, nnx.Variable):
                continue
            own = variable.get_metadata("on_get_value", None)
            self._hooks.append((variable, own))
            hook = functools.partial(_note_read, self.read, address, own)
            variable.set_metadata(on_get_value=hook)

    def stop(self) -> None:
        """Gives the Variables the hooks that they had."""
        for variable, own in self._hooks:
            if own is None:
                variable.del_metadata("on_get_value")
            else:
                variable.set_metadata(on_get_value=own)
        self._hooks.clear()


def _note_read(
    read: set[Address],
    address: Address,
    own: Callable[[Any, Any], Any] | None,
    variable: Variable,
    value: object,
) -> Any:
    read.add(address)
    return value if own is None else own(variable, value)


def _put(module: object, path: Path, item: object) -> Any:
    """Puts an item at a path below a module, if that is free and there is something to hold it.

    Returns the NNX object that has it now, None if there is no place for it.
    """
    node = owner = module
    for position, key in enumerate(path[:-1]):
        child = _child(node, key)
        if child is _ABSENT and (isinstance(node, dict) or _is_wrapper(node)):
            # Elsewhere a missing level may be a module, which only the call can create.
            for name in reversed(path[position + 1 :]):
                item = {name: item}
            return owner if _put_child(node, key, item) else None
        node = child
        owner = node if isinstance(node, nnx.Pytree) else owner
    return owner if _put_child(node, path[-1], item) else None


def _put_child(node: Any, key: Any, item: object) -> bool:
    items: Any = node
    if isinstance(node, nnx.List | list):
        index = int(key) if str(key).isdecimal() else -1
        if index == len(items):
            items.append(nnx.data(item) if isinstance(node, nnx.Pytree) else item)
            return True
        if not 0 <= index < len(items):
            return False
        key = index
    child = _child(node, key)
    if child is not _ABSENT and child is not None:
        return False
    if isinstance(node, nnx.Pytree) and isinstance(key, str | int):
        if inspect.getattr_static(items.__class__, str(key), None) is not None:
            return False
        # Marked, for a None was static.
        setattr(items, str(key), nnx.data(item))
        return True
    if isinstance(node, dict | list):
        items[key] = item
        return True
    return False


def _child(node: Any, key: object) -> Any:
    """What is below a node; keys are compared as text, as files keep them."""
    items: Any = node
    if isinstance(node, nnx.Pytree):
        return vars(node).get(str(key), _ABSENT)
    if isinstance(node, Mapping):
        return items[key] if key in items else _by_text(items, items, key)
    if isinstance(node, list | tuple):
        return _by_text({i: items[i] for i in range(len(items))}, range(len(items)), key)
    return _ABSENT


def _by_text(items: Mapping[Any, Any], keys: Iterable[Any], key: object) -> Any:
    return next((items[k] for k in keys if str(k) == str(key)), _ABSENT)


def _is_wrapper(node: object) -> bool:
    return isinstance(node, LinenHolder)


def _list_order(address: Address) -> list[Any]:
    return [(0, int(k), "") if str(k).isdecimal() else (1, 0, str(k)) for k in address[1]]
