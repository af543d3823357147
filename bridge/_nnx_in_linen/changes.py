"""Finds what a call changed in a module, by its whole state before and after, and writes it."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from flax import nnx

import registry
from bridge import _train_eval
from bridge._conversion.arrays import is_taken
from bridge._conversion.collections import ARRAYS, STATIC
from bridge._conversion.neutral import Address, Path
from bridge._errors import lifted_removal_text, path_text, untold_change_text
from bridge._flax.flattening import flatten
from bridge._flax.linen_modules import is_lifted
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

from .matched_variables import MatchedVariables, attach
from .scope import WrapperScope

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

    def __init__(self, objects: Sequence[nnx.Pytree]):
        self._objects = objects
        self._before = [(node, type(node), state_flags(node), dict(vars(node))) for node in objects]

    @contextlib.contextmanager
    def in_modes(self, module: nnx.Pytree) -> Generator[None]:
        """The module has the modes in force during a call; what the call sets itself stays."""
        _train_eval.set_on(module, self._objects)
        imposed = [
            (vars(node), name, attributes.get(name, _ABSENT), value)
            for node, _, _, attributes in self._before
            for name, value in vars(node).items()
            if attributes.get(name, _ABSENT) is not value
        ]
        try:
            yield
        finally:
            for now, name, before, during in imposed:
                if now.get(name, _ABSENT) is not during:
                    continue
                if before is _ABSENT:
                    del now[name]
                else:
                    now[name] = before

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

    def commit(self, scope: WrapperScope) -> None:
        """Writes the changes into the Linen variables, all of them or none.

        Raises LostUpdateError if something cannot be written and `strict` is True.
        """
        found = self._found
        is_mutable = functools.cache(scope.linen.is_mutable_collection)
        given = {(ARRAYS, path) for path, _ in found.graphdef.given}
        updates: dict[Address, Any] = {}
        for address, item in self.updates.items():
            # An argument stays one, and a value that is still the same is not lost.
            may_stay = address in given or not is_mutable(address[0])
            if not (may_stay and self.is_handed_on(address)):
                updates[address] = item
        kept = scope.as_linen((a, x) for a, x in updates.items() if scope.may_update(a, x))
        graphdef = self._new_definition(scope, given - updates.keys(), kept)
        if graphdef is not None:
            # Before the updates: a leaf may be gone to make room for a subtree.
            gone = self.removed - graphdef.slots.addresses
            scope.remove(map(found.placed, gone))
            scope.store_graphdef(graphdef)
        if kept:
            places = {address: found.placed(address) for address in kept}
            there = {places[a]: found.leaves[a] for a in kept if a in found.leaves}
            scope.write({places[a]: leaf for a, leaf in kept.items()}, there)

    def _new_definition(
        self, scope: WrapperScope, given: Set[Address], kept: Collection[Address]
    ) -> StaticGraphDef | None:
        """The GraphDef to be stored: None if it is the old one, or if it cannot be.

        It cannot be stored if its collection is not mutable, or if one of a leaf that comes and
        goes with it is not: a definition and its leaves have to stay together. In a lifted
        transform it cannot be stored if leaves are gone, because Linen merges the transform's
        output with its input. `given` are the arguments of the constructor that still are its own,
        and `kept` are the updates that are written.
        """
        graphdef = self.definition()
        if graphdef is None:
            return None
        found, linen, addresses = self._found, scope.linen, graphdef.slots.addresses
        if is_lifted(linen) and (places := self._staying(addresses)):
            scope.report_lost(tuple(places), lifted_removal_text(scope.where, places))
            return None
        still = given & addresses
        kept_given = tuple(item for item in found.graphdef.given if (ARRAYS, item[0]) in still)
        may_be_stored = scope.keeps_graphdef and not graphdef.is_bound
        graphdef = StaticGraphDef(graphdef, graphdef.avals, graphdef.origin, kept_given)
        needed = {s.address for s in graphdef.slots if linen.rng_state or not s.is_rng}
        touched = {STATIC, *(collection for collection, _ in self.removed)}
        is_stored = may_be_stored and all(map(linen.is_mutable_collection, touched))
        if is_stored and needed <= {*found.leaves, *kept}:
            return graphdef
        if untold := self._untold(scope):
            places = ["/".join(map(str, path)) for path in untold]
            scope.report_lost(tuple(places), untold_change_text(scope.where, places))
        return None

    def _staying(self, addresses: Collection[Address]) -> list[str]:
        """The state that is gone and that a merge brings back.

        A merge replaces a leaf if something new is in its place, above or below.
        """
        active = registry.current()
        prefixes = {(c, path[:length]) for c, path in addresses for length in range(len(path) + 1)}
        return [
            path_text(collection, path)
            for collection, path in sorted(self.removed - prefixes, key=str)
            if not is_output((collection, path), active)
            and not any((collection, path[:length]) in addresses for length in range(len(path)))
        ]

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

    def _untold(self, scope: WrapperScope) -> list[Path]:
        """Where the next call would find another module than this one, were it given the leaves.

        Leaves do not record the class of a new submodule, a static attribute, or that something is
        gone. A mode that the call has set, as `self.eval()` does, is not state to be lost: every
        call starts in the mode of the definition.
        """
        reshaped = self._reshaped()
        if self._is_same:
            return reshaped
        now, known = structure(self._graphdef), self._found.slots.addresses
        if not known <= self._after.keys():
            return [*dict.fromkeys(reshaped + differences_but_modes(now, structure(self._before)))]
        values = [leaf_value(self._after[address]) for address in self._found.slots.places]
        following = self._found.graphdef.blueprint.build(values).module
        new = ((a, item) for a, item in self._after.items() if a not in known)
        attach(following, scope.as_linen(new))
        # The caller's variables still hold these, so the next call would find them.
        there = {(collection, *map(str, path)) for collection, path in self._after}
        left = [path for c, path in self.removed if (c, *map(str, path)) not in there]
        return reshaped + left + differences_but_modes(now, structure(flatten(following)[0]))

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
