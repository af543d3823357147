"""RNG streams for constructors: a draw takes as long in a large trace as in a small one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx


class ConstructorStream(nnx.RngStream):
    """A stream that draws the keys of an `nnx.RngStream`, by the same operations.

    In Flax 0.12.8 a draw assigns the count by an index, which compares the count's sharding before
    and after. In a trace that raises inside of JAX, whose message looks through all equations so
    far: the time of a constructor grows with the square of the model. Here the count is replaced
    as a whole.
    """

    def __call__(self) -> jax.Array:
        """Draws a key."""
        count = self.count[...]
        key = jax.random.fold_in(self.key[...], count)
        self.count.set_value(count + 1)
        return key


def for_constructor(rngs: nnx.Rngs) -> nnx.Rngs:
    """The same `nnx.Rngs`, whose streams and forks of them are such ones.

    Args:
      rngs: one that nobody else has.
    """
    # A module may keep a stream in several places, and the finished module has native ones: only
    # the object itself can change without a search for all that refers to it.
    for name in rngs:
        object.__setattr__(rngs[name], "__class__", ConstructorStream)
    return rngs


def become_native(objects: Iterable[Any]) -> None:
    """Makes the streams among the objects of a constructed module native ones."""
    for each in objects:
        if type(each) is ConstructorStream:
            object.__setattr__(each, "__class__", nnx.RngStream)
