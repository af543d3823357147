"""An NNX module on Linen variables: makes it, gives it keys, calls it, and finds what changed.

No Linen module is in sight here; `to_linen` reads the variables and `commit` writes the changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx

import registry
from bridge import _train_eval
from bridge._conversion.arrays import taken
from bridge._conversion.neutral import Address
from bridge._errors import InvalidMethodError, MissingRngError
from bridge._flax.flattening import flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.scopes import undo_draws
from bridge._flax.variables import leaf_value
from bridge._graphdefs.leaves import GraphDefLeaf
from bridge._initialization.lazy_init import run_initializing
from bridge._randomness.streams import fold_path, stream_for
from bridge._types import Method

from .changes import AttributesBefore, Before, Changes, is_output
from .matched_variables import MatchedVariables, attach, noting_reads


class Call(NamedTuple):
    """A call of a method of an NNX module; `method` is as `nnx_method` of `ToLinen`."""

    method: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def function(
        self, module: nnx.Pytree, attributes: AttributesBefore | None = None
    ) -> Callable[..., Any]:
        """The method, which runs in the modes in force; `attributes` are those of the module."""
        function = method_of(module, self.method)
        if _train_eval.is_in_wrapper():
            attributes = attributes or AttributesBefore(nodes_below(module).objects)
            function = attributes.in_modes(module)(function)
        return function


class Streams:
    """The streams of a module during one call, and the keys that a scope gives to them.

    A module must have its keys before it is called, and keys that the call has not used are given
    back: a `ToNNX` around it advances the streams that were drawn from, and a deterministic call
    must leave them alone. `linen` is bound, or None if the call has no keys.
    """

    def __init__(
        self,
        linen: nn.Module | None = None,
        rngs: Mapping[str, Any] = MappingProxyType({}),
        stored: Collection[Address] = (),
    ):
        self._linen = linen
        self._rngs = rngs
        self._stored = stored
        self._names = [name for name in rngs if name != "params"]
        self._keys: dict[str, Any] = {}
        # By address of a stream of the module: the stream of the call that gave it its key.
        self._seeded: dict[Address, str] = {}
        self._unseeded: set[Address] = set()
        self._lent: list[_LentStream] = []

    def _seed(self, slot: GraphDefLeaf) -> Any:
        """The key of a stream, another for each stream and call; None if the call gives none."""
        linen = self._linen
        is_stored = slot.address in self._stored
        name = stream_for(slot.metadata.get("tag"), self._rngs, is_stored=is_stored)
        if linen is None or name is None or linen.is_initializing():
            return None
        self._seeded[slot.address] = name
        if name not in self._keys:
            self._keys[name] = linen.make_rng(name)
        return fold_path(self._keys[name], slot.path[:-1])

    def value(self, slot: GraphDefLeaf, aval: object, stored: object) -> Any:
        """What a key or a count of a stream is in the call."""
        key = self._seed(slot)
        if key is None:
            if stored is not None:
                return stored
            self._unseeded.add(slot.address)
        shape = getattr(aval, "shape", ())
        # Constants, so that a call that draws nothing has no equation for them.
        with jax.ensure_compile_time_eval():
            if slot.var_type is not None and issubclass(slot.var_type, nnx.RngCount):
                return jax.lax.full(shape, 0, jax.numpy.uint32)
            key = jax.random.key(0) if key is None else key
            return jax.random.split(key, shape) if shape else key

    def lend(self, objects: Iterable[nnx.Pytree], held: Iterable[tuple[Any, GraphDefLeaf]]) -> None:
        """Gives every `nnx.Rngs` the streams of the call that it lacks.

        It already has the streams for which `init` was given keys. For the others, a key of the
        call would otherwise reach a module through a stand-in, and its draws would depend on how
        the module was initialised.
        """
        owners = [item for item in objects if isinstance(item, nnx.Rngs)] if self._names else []
        slots = {id(item): slot for item, slot in held} if owners else {}
        for owner in owners:
            own = vars(owner)
            # The streams that replace missing ones: natively, and in a ToNNX.
            beside = own.get("default") or own.get("params")
            if isinstance(beside, nnx.RngStream) and id(beside.key) in slots:
                for name in [name for name in self._names if own.get(name) is None]:
                    self._lend(owner, name, beside, slots[id(beside.key)])

    def _lend(self, owner: nnx.Rngs, name: str, beside: nnx.RngStream, slot: GraphDefLeaf) -> None:
        path = (*slot.path[:-2], name, "key")
        address = slot.address[0], path
        key = self._seed(slot._replace(path=path, address=address, metadata={"tag": name}))
        if key is None:
            return
        shape = beside.key.shape
        # Updates of a reference are not told from outside, and no stream needs to be one.
        with jax.ensure_compile_time_eval(), nnx.var_defaults(hijax=False, ref=False):
            stream = nnx.RngStream(jax.random.split(key, shape) if shape else key, tag=name)
        setattr(owner, name, stream)
        count = stream.count.get_raw_value()
        self._lent.append(_LentStream(owner, name, stream, address, count))

    def take_back(self) -> None:
        """Removes the lent streams, before the module is looked at."""
        for lent in self._lent:
            if vars(lent.owner).get(lent.name) is lent.stream:
                delattr(lent.owner, lent.name)

    def settle(self, changes: Changes, where: str) -> None:
        """Gives back unused keys; what the call did use is not the model's state.

        Raises MissingRngError if the call has drawn from a stream that nothing gave a key to.
        """
        unseeded = {
            changes.updates[address].get_metadata("tag", "/".join(map(str, address[1])))
            for address in changes.drawn(self._unseeded)
        }
        if unseeded:
            # A program that gives `init` one key never writes the name `default`.
            is_default = "default" in unseeded
            name = "dropout" if is_default else min(unseeded)
            about = "'default' comes from a key without a name, and takes one of any name: "
            raise MissingRngError(
                where,
                sorted(unseeded),
                self._names,
                f"{about if is_default else ''}pass rngs={{{name!r}: key}} to apply, or variables"
                " with the collections RngKey and RngCount",
            )
        own = self._seeded.keys() - {lent.address for lent in self._lent}
        if self._linen is not None:
            drawn = changes.drawn(own) | {
                lent.address
                for lent in self._lent
                if not changes.passed.are_same(lent.stream.count.get_raw_value(), lent.count)
            }
            used = {self._seeded[address] for address in drawn}
            undo_draws(self._linen.scope, self._keys.keys() - used)
        changes.forget(own)


class _LentStream(NamedTuple):
    """A stream that an `nnx.Rngs`, its `owner`, has for one call.

    `address` is where it would be in Linen variables, and `count` its count before the call.
    """

    owner: nnx.Rngs
    name: str
    stream: nnx.RngStream
    address: Address
    count: Any


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
        with showing(module):
            function = call.function(module, attributes)
            if self._attached:
                function = noting_reads(self._attached, self._read)(function)
            if is_init:
                output = run_initializing(module, function, call.args, call.kwargs).output
            else:
                output = function(*call.args, **call.kwargs)
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
