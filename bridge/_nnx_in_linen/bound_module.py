"""An NNX module on Linen variables: makes it, calls it, and finds what changed.

No Linen module is in sight here; `to_linen` reads the variables and `commit` writes the changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from flax import nnx

import registry
from bridge import _train_eval
from bridge._conversion.arrays import taken
from bridge._conversion.neutral import Address
from bridge._errors import InvalidMethodError
from bridge._flax.flattening import flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.variables import leaf_value
from bridge._initialization.lazy_init import run_initializing
from bridge._types import Method

from .call_keys import Streams
from .changes import AttributesBefore, Before, Changes, is_output
from .matched_variables import MatchedVariables
from .new_state import Reads, attach


class Call(NamedTuple):
    """A call of a method of an NNX module; `method` is as `nnx_method` of `ToLinen`."""

    method: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def function(self, module: nnx.Pytree) -> Callable[..., Any]:
        """The method, which sets the modes in force on the module while it runs."""
        function = method_of(module, self.method)
        if not _train_eval.modes_in_force():
            return function

        def run(*args: object, **kwargs: object) -> Any:
            objects = nodes_below(module).objects
            attributes = AttributesBefore(objects)
            _train_eval.set_on(module, objects)
            attributes.note_imposed()
            try:
                return function(*args, **kwargs)
            finally:
                attributes.lift_imposed()

        return run


class BoundModule:
    """An NNX module made of a GraphDef and Linen variables, and what it was before the call.

    Every leaf in `found` but RNG state has to be there. `streams` is None if the module has no
    streams and the call has no keys; `changes` is None before the call.
    """

    def __init__(self, found: MatchedVariables, streams: Streams | None = None):
        self.found = found
        graphdef, slots = found.graphdef, found.slots
        values = found.values
        self.streams = streams or (Streams() if slots.rng else None)
        if self.streams:
            for i in slots.rng:
                values[i] = self.streams.value(slots[i], found.avals[i], values[i])
        before = {slot.address: value for slot, value in zip(slots, values, strict=True)}
        # A call may write into a list or dict that a Variable holds.
        leaves = [value if isinstance(value, jax.Array) else taken(value) for value in values]
        built = graphdef.blueprint.build(leaves)
        self.module = built.module
        self._objects = built.objects
        unknown = found.unknown
        self._attached = attach(self.module, unknown) if unknown else {}
        for address, (item, _) in self._attached.items():
            before[address] = leaf_value(item)
        self._refused = [address for address in unknown if address not in self._attached]
        # The definition that flattening gives: the stored one, unless state was added.
        definition: nnx.GraphDef[Any] = graphdef
        if self._attached:
            definition = flatten(self.module)[0]
        self._before = Before(found, before, definition, built.variables)
        self._read: set[Address] = set()
        if self.streams:
            self.streams.lend(self._objects, zip(built.variables, slots, strict=True))
        self.changes: Changes | None = None

    def call(
        self,
        call: Call,
        showing: Callable[[Any], AbstractContextManager[None]] = nullcontext,
        *,
        is_init: bool = False,
    ) -> Any:
        """Calls a method of the module, and takes the state that it leaves.

        Args:
          call: the method and its arguments.
          showing: the block that the module is called in.
          is_init: whether the call only creates: the state that is there stays as it is.
        """
        module = self.module
        attributes = AttributesBefore(self._objects)
        has_modes = _train_eval.set_on(module, self._objects)
        if has_modes:
            attributes.note_imposed()
        reads = Reads(self._attached) if self._attached else None
        with showing(module):
            function = method_of(module, call.method)
            if is_init:
                output = run_initializing(module, function, call.args, call.kwargs).output
            else:
                output = function(*call.args, **call.kwargs)
        if reads is not None:
            reads.stop()
            self._read = reads.read
        if has_modes:
            attributes.lift_imposed()
        if self.streams:
            self.streams.take_back()
        self.changes = Changes(self._before, attributes, module)
        return output

    def refused(self) -> list[Address]:
        """The leaves that have no place in the module."""
        active = registry.current()
        return [a for a in self._refused if not is_output(a, active)]

    def unused(self) -> list[Address]:
        """The leaves that the definition lacks, and that the call neither used nor removed.

        This includes a leaf that has no place, even if the call created another one at its address.
        """
        used = self._read
        if self.changes is not None:
            used = used | self.changes.updates.keys() | self.changes.removed
        used = used.difference(self._refused)
        active = registry.current()
        return [a for a in self.found.unknown if a not in used and not is_output(a, active)]


def method_of(module: object, method: Method) -> Callable[..., Any]:
    """The callable for a `nnx_method`: a name, a function of the module, or None for a call."""
    method = "__call__" if method is None else method
    if isinstance(method, str):
        found = getattr(module, method, None)
    else:
        found = functools.partial(method, module) if callable(method) else None
    if not callable(found):
        kind: type = type(module)
        own = {n for n in dir(kind) if callable(getattr(kind, n, None))}
        own -= set(dir(nnx.Module))
        available = [n for n in own if n == "__call__" or not n.startswith("_")]
        raise InvalidMethodError(kind, method, available)
    return found
