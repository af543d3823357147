"""The keys of one call, as streams of the `nnx.Rngs` in an NNX module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from bridge._conversion.neutral import Address
from bridge._flax.passed_values import PassedValues
from bridge._graphdefs.leaves import GraphDefLeaf

# The streams that replace missing ones: natively, and in a ToNNX.
_STAND_INS = ("default", "params")


class LentStream(NamedTuple):
    """A stream that an `nnx.Rngs` has for one call.

    Attributes:
      owner: the `nnx.Rngs`.
      name: the stream's name there.
      stream: the stream.
      address: where it would be in Linen variables.
      count: its count before the call.
    """

    owner: nnx.Rngs
    name: str
    stream: nnx.RngStream
    address: Address
    count: Any

    def take_back(self, passed: PassedValues) -> bool:
        """Removes the stream; returns whether the call drew from it."""
        if vars(self.owner).get(self.name) is self.stream:
            delattr(self.owner, self.name)
        return not passed.are_same(self.stream.count.get_raw_value(), self.count)


def lend(
    objects: Iterable[nnx.Pytree],
    slots: Sequence[tuple[Any, GraphDefLeaf]],
    names: Sequence[str],
    seed: Callable[[GraphDefLeaf], Any],
) -> list[LentStream]:
    """Gives every `nnx.Rngs` the streams of a call that it lacks.

    The streams that it has are those of the keys that `init` was given. Without these, a key of the
    call would reach a module by a stand-in, and its draws would depend on how the module was
    initialised.

    Args:
      objects: the objects of a module.
      slots: the module's Variables, each with its slot.
      names: the streams that the call has keys of.
      seed: as for `BoundModule`.

    Returns:
      The new streams. Each has to be taken back before the module is looked at.
    """
    lent: list[LentStream] = []
    owners = [item for item in objects if isinstance(item, nnx.Rngs)] if names else []
    by_key = {id(item): slot for item, slot in slots} if owners else {}
    for owner in owners:
        streams = {name: vars(owner).get(name) for name in (*_STAND_INS, *names)}
        found = [s for s in map(streams.get, _STAND_INS) if isinstance(s, nnx.RngStream)]
        beside = by_key.get(id(found[0].key)) if found else None
        if beside is None:
            continue
        for name in names:
            if streams[name] is None:
                lent += _lent(owner, name, found[0], beside, seed)
    return lent


def _lent(
    owner: nnx.Rngs,
    name: str,
    beside: nnx.RngStream,
    slot: GraphDefLeaf,
    seed: Callable[[GraphDefLeaf], Any],
) -> list[LentStream]:
    path = (*slot.path[:-2], name, "key")
    address = slot.address[0], path
    key = seed(slot._replace(path=path, address=address, metadata={"tag": name}))
    if key is None:
        return []
    shape = beside.key.shape
    # Updates of a reference are not told from outside, and no stream needs to be one.
    with jax.ensure_compile_time_eval(), nnx.var_defaults(hijax=False, ref=False):
        stream = nnx.RngStream(jax.random.split(key, shape) if shape else key, tag=name)
    setattr(owner, name, stream)
    return [LentStream(owner, name, stream, address, stream.count.get_raw_value())]
