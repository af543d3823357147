"""Where the keys of a call come from.

A wrapped Linen module draws from NNX streams. A key is drawn when a module asks for it and once in
a call, so a call that needs no randomness leaves every counter alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from flax.core.scope import LazyRng

from ._errors import InvalidRngsError
from ._typed_keys import is_key

_DEFAULT = "default"
# The streams that Linen's own layers ask for, besides `params`.
_STANDARD = ("dropout",)


class Draws:
    """The keys that one call may draw, by Linen's stream names.

    A key is computed when it is looked up, and the stream moves on when the call is over, if the
    key was used: a lifted transform takes all keys along, whether its body needs them or not.

    Where there is a source `default`, it serves every stream that has none of its own, with one
    draw each in the order in which they are first asked for, as `nnx.Rngs` does.

    Args:
      sources: a key, or a stream to draw it from, by name.
      plain: streams whose own key is used instead of a key drawn from them.
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

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The streams that exist, and those of Linen's own layers that `default` serves."""
        served = [name for name in _STANDARD if name not in self._sources and self.serves(name)]
        # Last, so that a lifted transform, which takes all along, draws for the others first.
        last = [_DEFAULT] if _DEFAULT in self._sources else []
        return (*(name for name in self._sources if name != _DEFAULT), *served, *last)

    def has(self, name: object) -> bool:
        """Whether there is a stream of this very name."""
        return name in self._sources

    def serves(self, name: object) -> bool:
        """Whether there is a key for this name, of its own or from `default`."""
        return name in self._sources or _DEFAULT in self._sources

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
        if is_stream and name != _DEFAULT:
            return jax.random.fold_in(source.key[...], source.count[...])
        nth = self._served.setdefault(name, len(self._served))
        default = self._sources[_DEFAULT]
        if isinstance(default, nnx.RngStream):
            return jax.random.fold_in(default.key[...], default.count[...] + nth)
        return jax.random.fold_in(default, nth)

    def commit(self, used: Set[str]) -> None:
        """Moves the streams on whose keys were used, as drawing from them would have done.

        Raises:
          TraceContextError: a stream belongs to another trace.
        """
        for name in used - self._served.keys() - set(self._plain):
            self._advance(name, 1)
        # A later draw may have been used where an earlier one was not, and no key may come again.
        self._advance(
            _DEFAULT, max((self._served[n] + 1 for n in used & self._served.keys()), default=0)
        )

    def _advance(self, name: str, count: int) -> None:
        source = self._sources.get(name)
        if isinstance(source, nnx.RngStream) and count:
            source.count[...] += count


class LazyKeys(Mapping[str, LazyRng]):
    """What a Linen scope keeps as its `rngs`; a key is computed on look-up.

    Args:
      draws: the keys.
      suffix: the path that Linen folds into them.
    """

    def __init__(self, draws: Draws, suffix: tuple[Any, ...] = ()):
        self._draws = draws
        self._suffix = suffix

    @property
    def draws(self) -> Draws:
        """The keys themselves, common to all scopes of a call."""
        return self._draws

    def below(self, name: str | None) -> LazyKeys:
        """The keys of the child scope of this name."""
        return LazyKeys(self._draws, (*self._suffix, name))

    def copy(self) -> LazyKeys:
        """The same keys; Linen copies what it is about to replace."""
        return self

    def __getitem__(self, name: str) -> LazyRng:
        if not self._draws.serves(name):
            raise KeyError(name)
        return LazyRng(self._draws.key(name), self._suffix)

    def __contains__(self, name: object) -> bool:
        # As in Linen and in `nnx.Rngs`, a stream that another one stands in for is not there.
        return self._draws.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._draws.names)

    def __len__(self) -> int:
        return len(self._draws.names)


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


def sources(rngs: Any, where: str) -> dict[str, Any]:
    """The streams or keys of an `rngs` argument, by Linen's names.

    Args:
      rngs: an `nnx.Rngs`, a stream, a key, a mapping of these by name, or None.
      where: who was given it, for the error.

    Returns:
      A stream or key by name; `default` serves as `params` where there is none.

    Raises:
      InvalidRngsError: `rngs` is none of these.
    """
    if rngs is None:
        found: dict[str, Any] = {}
    elif isinstance(rngs, nnx.Rngs):
        # Not items(): nnx.tabulate traces every public method of every node, and a generator cannot
        # be.
        found = {name: rngs[name] for name in rngs}
    elif isinstance(rngs, Mapping) and all(
        isinstance(k, str) and _is_source(v) for k, v in rngs.items()
    ):
        found = dict(rngs)
    elif _is_source(rngs):
        found = {"params": rngs}
    else:
        raise InvalidRngsError(rngs, where, remedy=_several_keys(rngs))
    if "default" in found and "params" not in found:
        found["params"] = found.pop("default")
    return found


def owned(rngs: Any, where: str) -> tuple[nnx.Rngs | None, frozenset[str]]:
    """The streams that a wrapper keeps, from its `rngs` argument.

    Args:
      rngs: an `nnx.Rngs`, which is forked, a key, a mapping of keys by name, or None.
      where: who was given it, for the error.

    Returns:
      (streams, names of the streams made of plain keys). The first draw of a stream is a key
      derived from its own, but Linen's `init` starts from the very key it is given.

    Raises:
      InvalidRngsError: `rngs` is none of these.
    """
    if rngs is None:
        return None, frozenset()
    if isinstance(rngs, nnx.Rngs):
        return rngs.fork(), frozenset()
    streams = sources(rngs, where)
    plain = frozenset(name for name, key in streams.items() if not isinstance(key, nnx.RngStream))
    return nnx.Rngs(**{n: s if n in plain else s.fork() for n, s in streams.items()}), plain


def _is_source(value: Any) -> bool:
    return isinstance(value, nnx.RngStream) or is_one_key(value)


def is_one_key(value: Any) -> bool:
    """Whether a value is a single key, a typed one or its bits."""
    return isinstance(value, jax.Array) and _key_dimensions(value) == 0


def _key_dimensions(value: jax.Array) -> int:
    """How many dimensions an array of keys has, -1 if it is none."""
    if is_key(value):
        return value.ndim
    return value.ndim - 1 if value.dtype == jax.numpy.uint32 else -1


def _several_keys(rngs: Any) -> str:
    """What to do where several keys were given for one."""
    keys = rngs.values() if isinstance(rngs, Mapping) else [rngs]
    if not any(isinstance(key, jax.Array) and _key_dimensions(key) > 0 for key in keys):
        return ""
    return (
        "that is an array of keys, as jax.random.split returns it; pass one of them, or make the"
        " wrapper inside of the function that jax.vmap or nnx.vmap maps over them"
    )


def fold_path(key: Any, path: tuple[Any, ...]) -> Any:
    """A typed key for the stream at a path below a ToLinen, another one for every path."""
    # Linen hashes the names without a separator, and a/ba is not ab/a.
    folded = LazyRng.create(key, *(f"\0{name}" for name in path)).as_jax_rng()
    return folded if is_key(folded) else jax.random.wrap_key_data(folded)


def stream_for(tag: Any, rngs: Mapping[str, Any], *, is_stored: bool = True) -> str | None:
    """Which of the call's streams seeds a stream of this tag.

    A module built from `nnx.Rngs(key)` has one stream, `default`, that stands for all.

    Args:
      tag: the stream's name when it was made.
      rngs: the call's keys.
      is_stored: whether the variables have the stream, which `params` does not replace then.
    """
    names = set(rngs)
    # Those that are iterated over include what another stream serves.
    if tag in rngs or tag in names:
        return tag
    others = sorted(names - {"params"})
    if tag == _DEFAULT and others:
        return others[0]
    return "params" if "params" in names and not is_stored else None


def stream_of(address: tuple[str, tuple[Any, ...]], leaf: Any) -> str | None:
    """The stream that a leaf is the key of: its tag, or the name it has in an `nnx.Rngs`."""
    collection, path = address
    if collection != nnx.RngKey.__name__:
        return None
    metadata = getattr(leaf, "metadata", None) if isinstance(leaf, meta.AxisMetadata) else None
    return (metadata or {}).get("tag") or (str(path[-2]) if len(path) > 1 else None)
