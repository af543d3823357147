"""The keys of one call of a Linen module, drawn when the module asks for them.

A wrapped Linen module draws from NNX streams. A key is drawn once in a call, and only if a module
asks for it, so a call that needs no randomness leaves every counter alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import jax
from flax import nnx

from .promises import part

# What a Linen scope keeps for a key: with the names to be folded into it, all of them at once.
LazyRng = part(
    "flax.core.scope",
    "LazyRng",
    lambda cls: cls.create(cls("key", ("a",)), "b").suffix == ("a", "b") and cls.as_jax_rng,
)
DEFAULT = "default"
# The streams that Linen's own layers ask for, besides `params`.
_STANDARD = ("dropout",)


class CallKeys:
    """The keys that one call may draw, by Linen's stream names.

    A key is computed when it is looked up, and the stream moves on when the call is over, if the
    key was used: a lifted transform takes all keys along, whether its body needs them or not.

    Where there is a source `default`, it serves every stream that has none of its own, with one
    draw each in the order in which they are first asked for, as `nnx.Rngs` does.

    Args:
      sources: a key, or a stream to draw it from, by name.
      plain: streams whose own key is used instead of a key drawn from them.

    Attributes:
      names: the streams that exist, and those of Linen's own layers that `default` serves.
    """

    def __init__(self, sources: Mapping[str, Any], plain: Collection[str] = ()):
        self._sources = dict(sources)
        self._plain = plain
        self._keys: dict[str, Any] = {}
        # By stream that `default` serves: which of its draws in this call.
        self._served: dict[str, int] = {}
        self.initializers = 0
        # The streams that initial values were drawn from.
        self.initial: set[str] = set()
        # Whether a transform has drawn a key from every stream, asked for or not.
        self.are_folded = False
        # Last, so that a lifted transform, which takes all along, draws for the others first.
        last = [DEFAULT] if DEFAULT in self._sources else []
        served = [name for name in _STANDARD if last and name not in self._sources]
        self.names = (*(name for name in self._sources if name != DEFAULT), *served, *last)

    # As a flag of a scope. `nn.jit` and `nn.fold_rngs` draw a key from each stream that there is,
    # and then keep the counters for the next call that looks alike, so the counters do not say what
    # was asked for. Both hash the flags of the module's scope, to tell whether they have compiled
    # this before; to them all keys are the same.
    def __hash__(self) -> int:
        self.are_folded = True
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallKeys)

    @property
    def drawn(self) -> dict[str, Any]:
        """The keys that were drawn from streams so far, by name."""
        default = self._sources.get(DEFAULT)
        return {
            name: key
            for name, key in self._keys.items()
            if isinstance(self._sources.get(name, default), nnx.RngStream)
        }

    def replaced(self, keys: Mapping[str, Any]) -> CallKeys:
        """The same streams with other keys, for the same call once more."""
        copy = CallKeys(self._sources, self._plain)
        copy._keys = {**self._keys, **keys}
        return copy

    def has(self, name: object) -> bool:
        """Whether there is a stream of this very name."""
        return name in self._sources

    def serves(self, name: object) -> bool:
        """Whether there is a key for this name, of its own or from `default`."""
        return name in self._sources or DEFAULT in self._sources

    def key(self, name: str) -> Any:
        """The key of a stream; the same one however often it is asked for."""
        if name not in self._keys:
            self._keys[name] = self._draw(name)
        return self._keys[name]

    def _draw(self, name: str) -> Any:
        source = self._sources.get(name)
        is_stream = isinstance(source, nnx.RngStream)
        if source is not None and not is_stream:
            return source
        if is_stream and name in self._plain:
            return source.key[...]
        if is_stream and name != DEFAULT:
            return jax.random.fold_in(source.key[...], source.count[...])
        nth = self._served.setdefault(name, len(self._served))
        default = self._sources[DEFAULT]
        if isinstance(default, nnx.RngStream):
            return jax.random.fold_in(default.key[...], default.count[...] + nth)
        return jax.random.fold_in(default, nth)

    def commit(self, used: Set[str]) -> None:
        """Moves the streams on whose keys were used, as drawing from them would have done.

        Raises:
          TraceContextError: a stream belongs to another trace.
        """
        moves = dict.fromkeys(used - self._served.keys() - set(self._plain), 1)
        if served := used & self._served.keys():
            # A later draw may have been used where an earlier one was not, and no key may come
            # again.
            moves[DEFAULT] = max(self._served[name] + 1 for name in served)
        for name, count in moves.items():
            source = self._sources.get(name)
            if isinstance(source, nnx.RngStream):
                source.count[...] += count


class LazyKeys(Mapping[str, Any]):
    """What a Linen scope keeps as its `rngs`; a key is computed on look-up.

    Args:
      draws: the keys.
      suffix: the path that Linen folds into them.

    Attributes:
      draws: the same keys, common to all scopes of a call.
      suffix: the path.
    """

    def __init__(self, draws: CallKeys, suffix: tuple[Any, ...] = ()):
        self.draws = draws
        self.suffix = suffix

    def copy(self) -> LazyKeys:
        """The same keys; Linen copies what it is about to replace."""
        return self

    def __getitem__(self, name: str) -> Any:
        if not self.draws.serves(name):
            raise KeyError(name)
        return LazyRng(self.draws.key(name), self.suffix)

    def __contains__(self, name: object) -> bool:
        # As in Linen and in `nnx.Rngs`, a stream that another one stands in for is not there.
        return self.draws.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.draws.names)

    def __len__(self) -> int:
        return len(self.draws.names)


def used_streams(counters: Mapping[Any, Any]) -> set[str]:
    """The streams that were asked for a key, from the counters of a Linen scope and its children.

    A lifted transform shares the counters with its body, which is why they tell more than the scope
    itself could.
    """
    used: set[str] = set()
    for name, count in counters.items():
        if isinstance(count, Mapping):
            used |= used_streams(count)
        elif count:
            used.add(name)
    return used


def folded_in(key: Any, names: Iterable[str]) -> Any:
    """A key with names folded in, as Linen derives the keys of a submodule from its path."""
    return LazyRng.create(key, *names).as_jax_rng()
