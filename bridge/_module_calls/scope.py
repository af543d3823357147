"""Shows a module the call that it is part of: keys, mutability and its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeGuard

import jax
from flax import nnx
from flax.core import DenyList

from bridge._errors import InvalidRngsError, MissingRngError
from bridge._randomness.streams import is_one_key
from bridge._types import CollectionFilter


class Scope(nnx.Pytree):
    """The keys and the mutable collections of a call, as a `bridge.Module` sees them.

    NNX's transforms split it together with the module during the call, so `nnx.split_rngs` gives
    each layer of a scan its own keys.

    Args:
      rngs: the streams that keys are drawn from.
      mutable: the collections that may be updated, as for Linen's `apply`; None if not given.
      path: the names that lead to the module.

    Source: flax/nnx/bridge/module.py:Scope @ 0.12.8
    """

    def __init__(
        self, rngs: nnx.Rngs, mutable: CollectionFilter | None, path: tuple[str, ...] = ()
    ):
        self.rngs = rngs
        self.mutable: CollectionFilter | None = hashable_filter(mutable)
        self.path = path

    def copy(self) -> Self:
        """Another scope with the same streams."""
        return type(self)(self.rngs, self.mutable, self.path)

    def is_mutable_collection(self, collection: str) -> bool:
        """Whether a collection may be updated."""
        return is_in(self.mutable, collection)

    def has_rng(self, name: str) -> bool:
        """Whether there is a stream of this name, or a `default` stream of an `nnx.Rngs`."""
        if is_of_linen(self.rngs):
            # One key for all is that of `params` in Linen.
            names = set(self.rngs)
            return name in (names if names != {"default"} else {"params"})
        return name in self.rngs or "default" in self.rngs

    def make_rng(self, name: str = "default") -> jax.Array:
        """The next key of a stream; `default`, then `params`, replaces a missing one.

        Raises:
          MissingRngError: none of these streams exists.
        """
        for known in (name, "default", "params"):
            if known in self.rngs:
                return self.rngs[known]()
        raise MissingRngError(
            f"the bridge.Module at /{'/'.join(self.path)}",
            [name],
            self.rngs,
            f"pass rngs={{{name!r}: key}} to init, apply or bind, or to the constructor of the"
            " outermost module",
        )


class LinenRngs(nnx.Rngs):
    """Streams of a key or of keys by name, as Linen takes them."""


def is_of_linen(rngs: nnx.Rngs) -> bool:
    """Whether streams were given as Linen takes them, and not as an `nnx.Rngs`."""
    return isinstance(rngs, LinenRngs)


def as_rngs(rngs: object, where: str) -> nnx.Rngs:
    """Streams of an `rngs` argument: an `nnx.Rngs` as it is, a number, a key, keys by name, None.

    Raises InvalidRngsError if it has another form.
    """
    if isinstance(rngs, nnx.Rngs):
        return rngs
    if rngs is None:
        return nnx.Rngs()
    if isinstance(rngs, Mapping) and all(isinstance(name, str) for name in rngs):
        if all(_is_seed(key) for key in rngs.values()):
            return LinenRngs(**rngs)
    elif _is_seed(rngs):
        return LinenRngs(rngs)
    raise InvalidRngsError(rngs, where)


def _is_seed(value: object) -> TypeGuard[int | jax.Array | nnx.RngStream]:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or isinstance(value, nnx.RngStream) or is_one_key(value)


def is_in(mutable: CollectionFilter | None, collection: str) -> bool:
    """Whether a filter of collections takes one; a filter that nobody has given takes all."""
    if mutable is None or mutable is True:
        return True
    if isinstance(mutable, DenyList):
        return not is_in(mutable.deny, collection)
    if mutable is False:
        return False
    return collection == mutable if isinstance(mutable, str) else collection in mutable


def hashable_filter(mutable: CollectionFilter | None) -> Any:
    """The same filter, so that it can be part of a GraphDef."""
    if isinstance(mutable, DenyList):
        return DenyList(hashable_filter(mutable.deny))
    if mutable is None or isinstance(mutable, bool | str):
        return mutable
    return frozenset(mutable)
