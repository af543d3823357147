"""What a call has changed in a module: its whole state afterwards against the one before."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

import registry
from bridge._conversion.arrays import is_taken
from bridge._conversion.neutral import Address, Path
from bridge._flax.flattening import flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import mark_arrays_as_data
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

from .matched_variables import MatchedVariables, slot_avals
from .new_state import attach


class Changes:
    """The state that a call leaves, compared by address with what went in.

    Unless `kept` says that only values can have changed, the module is flattened as a whole, by
    Flax's own walk, which knows every container. So it does not matter how the state was changed: a
    value that was set, a Variable, a submodule or an item of a container that was replaced, added,
    moved or removed.

    Args:
      found: what the module was made of.
      module: the module after the call.
      before: the value of every leaf before the call, by address.
      definition: the GraphDef that flattening the module would have given before the call.
      plain: the indices of leaves whose Variables were made plain ones for the call.
      kept: the Variable of every slot, None for a bare array, if it is known that nothing but their
        values can have changed; None if the module has to be looked at.

    Attributes:
      updates: the Variables and bare arrays that are new, or others than before.
      removed: the addresses of those that are gone.
    """

    def __init__(
        self,
        found: MatchedVariables,
        module: Any,
        before: Mapping[Address, Any],
        definition: nnx.GraphDef[Any],
        plain: Container[int],
        kept: Sequence[nnx.Variable[Any] | None] | None = None,
    ):
        self._found = found
        self._module = module
        self._plain = plain
        self._before = definition
        self._graphdef = definition
        self._is_same = True
        if kept is None:
            self._after = self._flattened(module)
        else:
            self._after = {
                slot.address: before[slot.address] if variable is None else variable
                for slot, variable in zip(found.graphdef.slots, kept, strict=True)
            }
        self.updates = {
            address: item
            for address, item in self._after.items()
            if address not in before or not _holds(item, before[address])
        }
        self.removed = frozenset(before.keys() - self._after.keys())

    def _flattened(self, module: Any) -> dict[Address, Any]:
        """The leaves of the module as it is now, by address."""
        graphdef, leaves = flatten(module)
        self._is_same = _is_same(graphdef, self._before)
        if not self._is_same:
            # An array that was assigned under a trace is static until it is marked.
            mark_arrays_as_data(nodes_below(module).objects)
            graphdef, leaves = flatten(module)
        self._graphdef = graphdef
        slots = self._found.graphdef.slots
        if not self._is_same or len(leaves) != len(slots):
            # The GraphDef has other leaves, or leaves with other addresses.
            slots = GraphDefLeaves(graphdef, registry.current())
        return {slot.address: leaf for slot, leaf in zip(slots, leaves, strict=True)}

    def definition(self) -> StaticGraphDef | None:
        """The GraphDef of the module as it is now, without what was sown.

        None if it is the one from before the call.
        """
        is_same = self._is_same or not differences(
            structure(self._graphdef), structure(self._before)
        )
        if is_same and not self._reshaped():
            return None
        _drop_sown(self._module)
        known = self._found.graphdef
        origin = known.origin
        if origin is not None and origin.constructed is None:
            origin = origin._replace(constructed=known)
        made, _ = static_graphdef.split(self._module, origin)
        originals = {
            slot.address: slot.metadata
            for i, slot in enumerate(self._found.graphdef.slots)
            if i in self._plain
        }
        return static_graphdef.with_metadata(made, originals) if originals else made

    def untold(self, leaf_of: Callable[[Any], Any]) -> list[Path]:
        """Where the next call would find another module than this one, were it given the leaves.

        Leaves alone do not tell the class of a new submodule, a static attribute, or that something
        is gone. A mode that the call has set, as `self.eval()` does, is no state to be lost: every
        call starts in the mode of the definition.

        Args:
          leaf_of: Variable or bare array -> the leaf in Linen variables.
        """
        reshaped = self._reshaped()
        if self._is_same:
            return reshaped
        slots = self._found.graphdef.slots
        if not slots.addresses <= self._after.keys():
            now, before = structure(self._graphdef), structure(self._before)
            return list(dict.fromkeys([*reshaped, *differences_but_modes(now, before)]))
        values = [leaf_value(self._after[slot.address]) for slot in slots]
        # The references are those of this module: new ones would be equations in a program.
        hijax = slots.special.difference(slots.references)
        following = self._found.graphdef.blueprint.build(values, hijax).module
        known = slots.addresses
        attach(following, {a: leaf_of(x) for a, x in self._after.items() if a not in known})
        # The caller's variables still hold these, so the next call would find them.
        there = {(collection, *map(str, path)) for collection, path in self._after}
        left = [path for c, path in self.removed if (c, *map(str, path)) not in there]
        now, then = structure(self._graphdef), structure(flatten(following)[0])
        told = differences_but_modes(now, then)
        return reshaped + left + told

    def _reshaped(self) -> list[Path]:
        """Parameters and statistics that have another shape now than the definition says."""
        graphdef = self._found.graphdef
        return [
            slot.path
            for slot, aval in zip(graphdef.slots, slot_avals(graphdef), strict=True)
            if slot.has_fixed_shape
            and slot.address in self.updates
            and isinstance(aval, jax.ShapeDtypeStruct)
            and getattr(leaf_value(self.updates[slot.address]), "shape", aval.shape) != aval.shape
        ]


def _is_same(a: nnx.GraphDef[Any], b: nnx.GraphDef[Any]) -> bool:
    return is_same_or_equal(a.attributes, b.attributes) and is_same_or_equal(a.nodes, b.nodes)


def _holds(item: Any, before: Any) -> bool:
    """Whether a leaf is unchanged; a ref counts as changed, as reading it returns a new array."""
    return is_taken(leaf_value(item), before)


def _drop_sown(module: Any) -> None:
    """Removes what was sown: it is the output of a call, and none of the model's state."""
    for node in nodes_below(module).objects:
        for name, value in list(vars(node).items()):
            if _is_sown(value) or (type(value) is dict and _drop_sown_items(value) and not value):
                delattr(node, name)


def _drop_sown_items(tree: dict[Any, Any]) -> bool:
    """The same for nested dicts; whether anything was removed."""
    dropped = False
    for key, value in list(tree.items()):
        if _is_sown(value) or (type(value) is dict and _drop_sown_items(value) and not value):
            del tree[key]
            dropped = True
    return dropped


def _is_sown(value: Any) -> bool:
    if not isinstance(value, nnx.Variable) or not issubclass(value.var_type, nnx.Intermediate):
        return False
    # A perturbation is made by `init` too.
    return not issubclass(value.var_type, nnx.Perturbation)
