"""The keys of one call for the streams of an NNX module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx

from bridge._conversion.neutral import Address
from bridge._errors import MissingRngError
from bridge._flax.scopes import undo_draws
from bridge._graphdefs.leaves import GraphDefLeaf
from bridge._randomness.streams import fold_path, stream_for

from .changes import Changes

# The streams that replace missing ones: natively, and in a ToNNX.
_STAND_INS = ("default", "params")


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
        names = self._names
        owners = [item for item in objects if isinstance(item, nnx.Rngs)] if names else []
        by_key = {id(item): slot for item, slot in held} if owners else {}
        for owner in owners:
            streams = {name: vars(owner).get(name) for name in (*_STAND_INS, *names)}
            found = [s for s in map(streams.get, _STAND_INS) if isinstance(s, nnx.RngStream)]
            beside = by_key.get(id(found[0].key)) if found else None
            if beside is not None:
                for name in [name for name in names if streams[name] is None]:
                    self._lend(owner, name, found[0], beside)

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
