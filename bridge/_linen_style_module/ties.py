"""Attributes that refer to modules of the call, such as a bound method that `setup` keeps.

A GraphDef takes a static attribute as it is, so a copy that NNX makes would call the module that it
was copied from. Linen runs `setup` again for every copy. Here such a value is kept without the
modules and Variables in it, and made again for each call of the module that is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.linen_attributes import LinenHolder
from bridge._errors import DeclarationError, InvalidModuleError
from bridge._flax.nodes import items_of
from bridge._flax.objects import attributes_of, is_data_attribute
from bridge._flax.self_references import Tie, nodes_in, tied, value_of
from bridge._module_calls.calls import ModuleInCall, record_of

from .attributes import (
    IS_SETUP,
    Otherwise,
    Ref,
    Standin,
    is_reserved_name,
    names_of,
    refs,
    set_name,
)
from .submodules import is_lazy


class Group(NamedTuple):
    """What a module has set that refers to nodes, in one piece: attributes may share objects.

    Attributes:
      tie: the values without nodes.
      places: where the nodes are, seen from the module: how many modules further up, and the keys
        from there.
    """

    tie: Tie
    places: tuple[tuple[int, tuple[Any, ...]], ...]

    def of(self, module: Any, name: str) -> Sequence[Any]:
        """The values for a module; `name` is one of them, for the error."""
        record = record_of(module)
        known = None if record is None else record.made.get(id(self.tie))
        if known is not None:
            return known[1]
        nodes: list[Any] = []
        for above, path in self.places:
            owner = record
            for _ in range(above):
                owner = owner and owner.parent
            if above and owner is None:
                raise DeclarationError.of_reference(type(module).__name__, name)
            node = module if owner is None else owner.module
            for key in path:
                node = _items(node)[key]
            nodes.append(node)
        values = value_of(self.tie, nodes)
        if record is not None:
            # An object is one and the same for a whole call.
            record.made[id(self.tie)] = self.tie, values
        return values


@dataclasses.dataclass
class Tied(Standin):
    """One value of a group. The group is known when all values are."""

    position: int
    group: Group | None = None

    def of(self, module: Any, name: str) -> Any:
        """The value for a module."""
        return self.group and self.group.of(module, name)[self.position]

    def __hash__(self) -> int:
        return hash((self.position, self.group))


def tie_attributes(record: ModuleInCall) -> None:
    """Keeps what `setup` has set without the nodes in it, and so the fields of its submodules.

    Raises:
      InvalidModuleError: a value cannot be kept so, and the module stays after the call.
    """
    module = record.module
    names, tying = names_of(module), _Tying(record)
    own = {n: x for n, x in attributes_of(module).items() if not is_reserved_name(n)}
    for name, value in {**own, **names}.items():
        if name not in names and isinstance(value, LinenHolder):
            tying.check_layer(name, value)
        elif name in names or not is_data_attribute(module, name):
            structure = tying.tied(name, value)
            if structure is not value:
                if name not in names:
                    delattr(module, name)
                set_name(module, name, structure)
    tying.finish()
    for value in own.values():
        if is_lazy(value) and not attributes_of(value)[IS_SETUP]:
            below = record.call.find(value)
            if below is not None and below.parent is record:
                tie_attributes(below)


class _Tying:
    """The values of a module that refer to nodes."""

    def __init__(self, record: ModuleInCall):
        self._record = record
        self._nodes: dict[int, Any] = {}
        self._places: dict[int, tuple[int, tuple[Any, ...]]] = {}
        self._values: list[Any] = []
        self._tied: list[Tied] = []

    def tied(self, name: str, value: Any) -> Any:
        """A value, or a structure of `set_name`, with `Tied`s; itself, if it refers to no node."""
        if isinstance(value, Ref | Standin | Otherwise):
            return value
        is_structure = any(True for _ in refs(value))
        if is_structure and isinstance(value, FrozenDict):
            new = {key: self.tied(name, item) for key, item in value.items()}
            is_same = all(new[key] is item for key, item in value.items())
            return value if is_same else FrozenDict(new)
        if is_structure:
            items = [self.tied(name, item) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not self._is_found(name, value):
            return value
        self._values.append(value)
        self._tied.append(Tied(len(self._tied)))
        return self._tied[-1]

    def _is_found(self, name: str, value: Any) -> bool:
        places, nodes = self._found(value)
        if not places:
            return False
        try:
            # One by one, for the error.
            tied(value, [nodes[number] for number in places])
        except Exception as error:
            if self._record.call.is_kept:
                why = f"and could not make this one again ({error})"
                raise _error(self._record, name, value, why) from error
            return False
        self._places |= places
        self._nodes |= nodes
        return True

    def check_layer(self, name: str, layer: LinenHolder) -> None:
        """Raises InvalidModuleError for a Linen layer that calls a `bridge.Module`."""
        if self._record.call.is_kept and self._found(layer.to_nnx__module)[0]:
            why = "and a Linen layer keeps its functions as they are"
            raise _error(self._record, name, layer.to_nnx__module, why)

    def finish(self) -> None:
        """Gives the `Tied`s their group."""
        if self._tied:
            tie = tied(self._values, [self._nodes[number] for number in self._places])
            self._record.made[id(tie)] = tie, self._values
            for each in self._tied:
                each.group = Group(tie, tuple(self._places.values()))

    def _found(self, value: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        nodes = {id(node): node for node in nodes_in(value)}
        return (dict(_places(self._record, nodes)) if nodes else {}), nodes


def _error(record: ModuleInCall, name: str, value: Any, why: str) -> InvalidModuleError:
    return InvalidModuleError(
        f"{type(record.module).__name__}.{name}",
        value,
        "a method, a lambda, a partial or another object that can be made again",
        "it refers to a module of this call. Every copy of the model needs one that refers to the"
        f" copy, {why}: make it a method of the class",
    )


def _places(
    record: ModuleInCall, wanted: Iterable[int]
) -> Iterator[tuple[int, tuple[int, tuple[Any, ...]]]]:
    """(id of a node, its place as `Tied` has it) of those that are part of the call."""
    left, seen = set(wanted), set()
    above, owner = 0, record
    while owner is not None and left:
        pending: list[tuple[tuple[Any, ...], Any]] = [((), owner.module)]
        while pending and left:
            path, node = pending.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if id(node) in left:
                left.discard(id(node))
                yield id(node), (above, path)
            if not isinstance(node, nnx.Variable):
                pending.extend(((*path, key), item) for key, item in _items(node).items())
        above, owner = above + 1, owner.parent


def _items(node: Any) -> Any:
    """What is below a node, by key."""
    if not isinstance(node, nnx.Pytree):
        return items_of(node)
    return {name: value for name, value in vars(node).items() if is_data_attribute(node, name)}
