"""Finds what a call changed in a module, by its whole state before and after."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

import registry
from bridge._conversion.arrays import is_taken
from bridge._conversion.neutral import Address, Path
from bridge._flax.flattening import flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import mark_arrays_as_data, state_flags
from bridge._flax.passed_values import PassedValues
from bridge._flax.variables import leaf_value
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.leaves import GraphDefLeaves
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._graphdefs.structure import (
    differences,
    differences_but_modes,
    is_same_or_equal,
    structure,
)
from bridge._initialization.snapshot import drop_sown

from .matched_variables import MatchedVariables
from .new_state import attach

_ABSENT = object()


class Before(NamedTuple):
    """A module that was made of variables (`found`), before a call.

    Attributes:
      values: the value of every leaf, by address.
      definition: the GraphDef that flattening the module would have given.
      variables: the Variable of every slot, None for a bare array.
    """

    found: MatchedVariables
    values: Mapping[Address, Any]
    definition: nnx.GraphDef[Any]
    variables: Sequence[nnx.Variable[Any] | None]


class AttributesBefore:
    """What each NNX object of a module holds now."""

    def __init__(self, objects: Iterable[nnx.Pytree]):
        self._before = [(node, type(node), state_flags(node), dict(vars(node))) for node in objects]
        self._imposed: list[tuple[nnx.Pytree, str, Any, Any]] = []

    def note_imposed(self) -> None:
        """Notes that what has been set until now is for the call alone, as its mode is."""
        self._imposed = [
            (node, name, attributes.get(name, _ABSENT), value)
            for node, _, _, attributes in self._before
            for name, value in vars(node).items()
            if attributes.get(name, _ABSENT) is not value
        ]

    def lift_imposed(self) -> None:
        """Takes that back where it is still as it was set."""
        for node, name, before, during in self._imposed:
            if vars(node).get(name, _ABSENT) is not during:
                continue
            if before is _ABSENT:
                del vars(node)[name]
            else:
                vars(node)[name] = before

    def are_kept(self) -> bool:
        """Whether every object has the attributes that it had: the same values, by identity."""
        for node, kind, flags, before in self._before:
            if type(node) is not kind or state_flags(node) != flags:
                return False
            if not holds_the_same(vars(node), before):
                return False
        return True


def holds_the_same(items: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two mappings hold the same objects by the same names, in the same order."""
    return list(items) == list(before) and all(map(operator.is_, items.values(), before.values()))


class Changes:
    """The state that a call leaves, compared by address with what went in.

    Unless only values can have changed, Flax's own walk, which knows every container, flattens the
    whole module. So it does not matter how the state was changed: a value may have been set, or a
    Variable, a submodule or an item of a container replaced, added, moved or removed.

    Flattening takes longer than everything else in a call. It is skipped if there are only objects
    and Variables, and each is as it was: an object by its type, its flags and its attributes, by
    identity; a Variable by its type and its metadata. A GraphDef holds no more about them.

    Attributes:
      updates: the Variables and bare arrays that are new, or differ from before.
      removed: the addresses of those that are gone.
    """

    def __init__(self, before: Before, attributes: AttributesBefore, module: nnx.Pytree):
        self._found = before.found
        self._module = module
        self._after: dict[Address, Any] = {}
        self._values = values = before.values
        self._before = self._graphdef = before.definition
        self._is_same = True
        slots, graphdef = before.found.slots, before.found.graphdef
        if (
            before.definition is graphdef
            and (blueprint := graphdef.blueprint).has_only_objects
            and attributes.are_kept()
            and all(map(_is_as_made, before.variables, blueprint.leaves))
        ):
            self.removed: frozenset[Address] = frozenset()
            self.updates: dict[Address, Any] = {
                slot.address: variable
                for slot, variable in zip(slots, before.variables, strict=True)
                if variable is not None
                and (value := variable.get_raw_value()) is not values[slot.address]
                and not is_taken(value, values[slot.address])
            }
        else:
            self._after = self._flattened(module)
            self.removed = frozenset(values.keys() - self._after.keys())
            self.updates = {
                address: item
                for address, item in self._after.items()
                if address not in values or not is_taken(leaf_value(item), values[address])
            }

    @functools.cached_property
    def passed(self) -> PassedValues:
        """What compares values with those that programs have handed on."""
        return PassedValues()

    def __bool__(self) -> bool:
        return bool(self.updates or self.removed or not self._is_same)

    def _flattened(self, module: nnx.Pytree) -> dict[Address, Any]:
        """The leaves of the module as it is now, by address."""
        graphdef, leaves = flatten(module)
        self._is_same = _is_same(graphdef, self._before)
        if not self._is_same:
            # An array that was assigned under a trace is static until it is marked.
            mark_arrays_as_data(nodes_below(module).objects)
            graphdef, leaves = flatten(module)
        self._graphdef = graphdef
        slots = self._found.slots
        if not self._is_same or len(leaves) != len(slots):
            # The GraphDef has other leaves, or leaves with other addresses.
            slots = GraphDefLeaves(graphdef, registry.current())
        return {slot.address: leaf for slot, leaf in zip(slots, leaves, strict=True)}

    def is_handed_on(self, address: Address) -> bool:
        """Whether an update has the value from before the call, as from an `nnx.jit` in it."""
        return address in self._values and self.passed.are_same(
            leaf_value(self.updates[address]), self._values[address]
        )

    def drawn(self, addresses: Iterable[Address]) -> set[Address]:
        """Those of some leaves of streams that the call has drawn from."""
        return {a for a in addresses if a in self.updates and not self.is_handed_on(a)}

    def forget(self, addresses: Iterable[Address]) -> None:
        """Takes leaves out of the updates that are not the model's state."""
        for address in addresses:
            self.updates.pop(address, None)

    def removed_state(self) -> list[Address]:
        """The leaves that are gone and were not sown."""
        active = registry.current()
        return sorted((a for a in self.removed if not is_output(a, active)), key=str)

    def definition(self) -> StaticGraphDef | None:
        """The GraphDef of the module as it is now, without what was sown.

        None if it is the one from before the call.
        """
        is_same = self._is_same or not differences(
            structure(self._graphdef), structure(self._before)
        )
        if is_same and not self._reshaped():
            return None
        drop_sown(nodes_below(self._module))
        origin = self._found.graphdef.origin
        if origin is not None:
            origin = origin._replace(is_changed=True)
        return static_graphdef.split(self._module, origin)[0]

    def untold(
        self, as_linen: Callable[[Iterable[tuple[Address, Any]]], Mapping[Address, Any]]
    ) -> list[Path]:
        """Where the next call would find another module than this one, were it given the leaves.

        Leaves do not record the class of a new submodule, a static attribute, or that something is
        gone. A mode that the call has set, as `self.eval()` does, is not state to be lost: every
        call starts in the mode of the definition. `as_linen` converts Variables and bare arrays to
        the leaves of Linen variables.
        """
        reshaped = self._reshaped()
        if self._is_same:
            return reshaped
        slots = self._found.slots
        if not slots.addresses <= self._after.keys():
            now, before = structure(self._graphdef), structure(self._before)
            return list(dict.fromkeys([*reshaped, *differences_but_modes(now, before)]))
        values = [leaf_value(self._after[slot.address]) for slot in slots]
        following = self._found.graphdef.blueprint.build(values).module
        known = slots.addresses
        attach(following, as_linen((a, x) for a, x in self._after.items() if a not in known))
        # The caller's variables still hold these, so the next call would find them.
        there = {(collection, *map(str, path)) for collection, path in self._after}
        left = [path for c, path in self.removed if (c, *map(str, path)) not in there]
        now, then = structure(self._graphdef), structure(flatten(following)[0])
        told = differences_but_modes(now, then)
        return reshaped + left + told

    def _reshaped(self) -> list[Path]:
        """Parameters and statistics that have another shape now than the definition says."""
        return [
            slot.path
            for slot, aval in zip(self._found.slots, self._found.avals, strict=True)
            if slot.has_fixed_shape
            and slot.address in self.updates
            and isinstance(aval, jax.ShapeDtypeStruct)
            and getattr(leaf_value(self.updates[slot.address]), "shape", aval.shape) != aval.shape
        ]


def _is_same(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    return is_same_or_equal(a.attributes, b.attributes) and is_same_or_equal(a.nodes, b.nodes)


def _is_as_made(variable: nnx.Variable[Any] | None, made_of: Any) -> bool:
    """Whether a Variable, or a bare array, has the type and metadata that it was made of."""
    return variable is None or (
        type(variable) is made_of[0] and holds_the_same(variable.get_metadata(), made_of[1])
    )


def is_output(address: Address, active: registry.Registry) -> bool:
    """Whether a leaf is in a collection of what calls sow."""
    return issubclass(active.type_from_name(address[0]), nnx.Intermediate)
