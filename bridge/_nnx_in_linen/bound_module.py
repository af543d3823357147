"""An NNX module on Linen variables: merges it, calls it, and finds what changed.

No Linen module is in sight here; `_to_linen` reads the variables and writes the changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import nnx

import registry
from bridge import _train_eval
from bridge._conversion.arrays import taken
from bridge._conversion.neutral import Address, Path
from bridge._errors import InvalidMethodError, MissingRngError
from bridge._flax.flattening import flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import attributes_dict
from bridge._flax.passed_values import PassedValues
from bridge._flax.variables import leaf_value
from bridge._graphdefs.leaves import GraphDefLeaf
from bridge._graphdefs.static_graphdef import StaticGraphDef

from .attributes_before import AttributesBefore, holds_the_same
from .changes import Changes
from .lent_streams import lend
from .matched_variables import MatchedVariables, slot_avals
from .new_state import Reads, attach


class BoundModule:
    """An NNX module made of a GraphDef and Linen variables, and what it was before the call.

    Args:
      found: the variables and the module's definition; every leaf but RNG state has to be there.
      seed: for a slot of an RNG stream the key that the call's `rngs` give to the stream, None if
        they give none.
      is_mutable: whether updates of a collection are kept. Where they are not, Variables are plain
        ones: neither references, whose updates nothing tells from a read, nor hijax Variables,
        which cannot be differentiated.
      streams: the names of the streams that the call has keys of.
    """

    def __init__(
        self,
        found: MatchedVariables,
        seed: Callable[[GraphDefLeaf], Any],
        is_mutable: Callable[[str], bool] = lambda collection: True,
        streams: Sequence[str] = (),
    ):
        self._found = found
        graphdef = found.graphdef
        slots = graphdef.slots
        self._seeded: set[Address] = set()
        self._unseeded: set[Address] = set()
        values = found.values
        for i in slots.rng:
            values[i] = self._rng_value(slots[i], slot_avals(graphdef)[i], values[i], seed)
        before = {slot.address: value for slot, value in zip(slots, values, strict=True)}
        self._plain = {i for i in slots.special if not is_mutable(slots[i].address[0])}
        # A call may write into a list or dict that a Variable holds.
        leaves = list(map(taken, values))
        for i in slots.references:
            if i not in self._plain:
                leaves[i] = jax.new_ref(leaves[i])
        built = graphdef.blueprint.build(leaves, self._plain)
        self.module, self._variables, self._objects = built
        unknown = found.unknown
        self._attached = attach(self.module, unknown) if unknown else {}
        for address, (item, _) in self._attached.items():
            before[address] = leaf_value(item)
        self._refused = [address for address in unknown if address not in self._attached]
        # The definition that flattening gives: the stored one, unless state was added.
        definition: nnx.GraphDef[Any] = graphdef
        if self._attached or self._plain:
            definition = flatten(self.module)[0]
        self._before = before
        self._definition = definition
        self._read: set[Address] = set()
        self._drawn: set[Address] = set()
        self._passed = PassedValues()
        held = list(zip(self._variables, slots, strict=True)) if streams else []
        self._lent = lend(self._objects, held, streams, seed)
        self.changes: Changes | None = None

    def call(
        self,
        method: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: str,
        run: Callable[..., Any] | None = None,
        showing: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Calls a method of the module, and takes the state that it leaves.

        Args:
          method: as `nnx_method` of `ToLinen`.
          args: positional arguments.
          kwargs: keyword arguments.
          where: the wrapper, for errors.
          run: what makes the call of `(module, function, args, kwargs)`, if not the call itself.
          showing: the block that the module is called in.

        Raises:
          MissingRngError: it drew from a stream that has no key.
        """
        attributes = AttributesBefore(self._objects)
        _train_eval.set_on(self.module, self._objects)
        attributes.note_imposed()
        reads = Reads(
            {
                address: attached.item
                for address, attached in self._attached.items()
                if isinstance(attached.item, nnx.Variable) and not attached.is_linen
            }
        )
        with showing(self.module):
            function = method_of(self.module, method)
            if run is None:
                output = function(*args, **kwargs)
            else:
                output = run(self.module, function, args, kwargs)
        reads.stop()
        self._read = reads.read | {a for a, (_, is_linen) in self._attached.items() if is_linen}
        attributes.lift_imposed()
        self._drawn = {lent.address for lent in self._lent if lent.take_back(self._passed)}
        is_kept = self._is_kept(attributes)
        changes = Changes(
            self._found,
            self.module,
            self._before,
            self._definition,
            self._plain,
            self._variables if is_kept else None,
        )
        self.changes = changes
        self._check_keys(changes, where)
        return output

    def updates(self) -> dict[Address, Any]:
        """The Variables and bare arrays that are new, or others than before, by address.

        A stream that the call's own `rngs` seeded is not among them: its state is not the model's.
        """
        updates = self.changes.updates if self.changes else {}
        return {a: item for a, item in updates.items() if a not in self._seeded}

    def is_handed_on(self, address: Address) -> bool:
        """Whether an update has the value from before the call, as from an `nnx.jit` in it."""
        updates = self.changes.updates if self.changes else {}
        return address in self._before and self._passed.are_same(
            leaf_value(updates[address]), self._before[address]
        )

    def removed(self) -> frozenset[Address]:
        """The leaves that are gone, by address."""
        return self.changes.removed if self.changes else frozenset()

    def removed_state(self) -> list[Address]:
        """Those of them that were not sown."""
        active = registry.current()
        return sorted((a for a in self.removed() if not _is_output(a, active)), key=str)

    def definition(self) -> StaticGraphDef | None:
        """The GraphDef after the call, if it is another; see `Changes.definition`."""
        return self.changes.definition() if self.changes else None

    def untold(self, leaf_of: Callable[[Any], Any]) -> list[Path]:
        """What updates alone do not tell of a change; see `Changes.untold`."""
        return self.changes.untold(leaf_of) if self.changes else []

    def drawn(self) -> set[Address]:
        """The seeded leaves of the streams that the call drew from."""
        updates = self.changes.updates if self.changes else {}
        seeded = self._seeded & updates.keys()
        return self._drawn | {address for address in seeded if not self.is_handed_on(address)}

    def refused(self) -> list[Address]:
        """The leaves that have no place in the module."""
        active = registry.current()
        return [address for address in self._refused if not _is_output(address, active)]

    def unused(self) -> list[Address]:
        """The leaves that the definition lacks, and that the call neither used nor removed.

        This includes a leaf without a place, even if the call created another one at its address.
        """
        active = registry.current()
        updates = self.changes.updates if self.changes else {}
        used = (self._read | updates.keys() | self.removed()).difference(self._refused)
        return [a for a in self._found.unknown if a not in used and not _is_output(a, active)]

    def _check_keys(self, changes: Changes, where: str) -> None:
        """Raises if the call has drawn from a stream that nothing gave a key to."""
        drawn = {
            item.get_metadata("tag", "/".join(map(str, address[1])))
            for address, item in changes.updates.items()
            if address in self._unseeded and not self.is_handed_on(address)
        }
        if drawn:
            raise MissingRngError(
                where,
                sorted(drawn),
                [],
                "pass rngs={name: key} to apply, or variables with the collections RngKey and"
                " RngCount",
            )

    def _is_kept(self, attributes: AttributesBefore) -> bool:
        """Whether the module is as it was built, but for the values of its Variables.

        Flattening it would tell too, and takes longer than all else that a call costs. This cannot
        be wrong where there are only objects and plain Variables, as a GraphDef says no more of
        them: the type, the flags and the attributes of an object, by identity; the type and the
        metadata of a Variable.
        """
        graphdef = self._found.graphdef
        return (
            self._definition is graphdef
            and graphdef.blueprint.has_only_objects
            and attributes.are_kept()
            and all(map(_is_as_made, self._variables, graphdef.slots))
        )

    def _rng_value(
        self, slot: GraphDefLeaf, aval: Any, stored: Any, seed: Callable[[GraphDefLeaf], Any]
    ) -> Any:
        key = seed(slot)
        if key is not None:
            self._seeded.add(slot.address)
        elif stored is not None:
            return stored
        else:
            self._unseeded.add(slot.address)
        shape = getattr(aval, "shape", ())
        # Constants, so that a call that draws nothing has no equation for them.
        with jax.ensure_compile_time_eval():
            if slot.var_type is nnx.RngCount:
                return jax.numpy.zeros(shape, jax.numpy.uint32)
            key = jax.random.key(0) if key is None else key
            return jax.random.split(key, shape) if shape else key


def _is_as_made(variable: nnx.Variable[Any] | None, slot: GraphDefLeaf) -> bool:
    """Whether a Variable, or a bare array, is still what its slot says, whatever it holds."""
    return variable is None or (
        type(variable) is slot.var_type
        and holds_the_same(variable.get_metadata(), attributes_dict(slot.metadata))
    )


def method_in_modes(module: Any, method: Any) -> Callable[..., Any]:
    """`method_of`, which sets the modes in force on the module while it runs."""
    function = method_of(module, method)
    if not _train_eval.modes_in_force():
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        objects = nodes_below(module).objects
        attributes = AttributesBefore(objects)
        _train_eval.set_on(module, objects)
        attributes.note_imposed()
        try:
            return function(*args, **kwargs)
        finally:
            attributes.lift_imposed()

    return run


def method_of(module: Any, method: Any) -> Callable[..., Any]:
    """The callable for a `nnx_method`: a name, a function of the module, or None for a call."""
    method = "__call__" if method is None else method
    if isinstance(method, str):
        found = getattr(module, method, None)
    else:
        found = functools.partial(method, module) if callable(method) else None
    if not callable(found):
        own = {n for n in dir(type(module)) if callable(getattr(type(module), n, None))}
        own -= set(dir(nnx.Module))
        available = [n for n in own if n == "__call__" or not n.startswith("_")]
        raise InvalidMethodError(type(module), method, available)
    return found


def _is_output(address: Address, active: registry.Registry) -> bool:
    return issubclass(active.type_from_name(address[0]), nnx.Intermediate)
