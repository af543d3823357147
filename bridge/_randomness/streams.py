"""Reads the streams and keys of an `rngs` argument, and matches them with a module's streams."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta

import registry
from bridge._errors import InvalidRngsError
from bridge._flax.scopes import DEFAULT

from .typed_keys import is_key

DROPOUT = "dropout"


def sources(rngs: object, where: str) -> dict[str, Any]:
    """The streams or keys of an `rngs` argument, by Linen's names.

    `rngs` is an `nnx.Rngs`, a stream, a key, a mapping of these by name, or None; anything else
    raises InvalidRngsError. `default` serves as `params` where there is none.
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


def owned(rngs: object, where: str) -> tuple[nnx.Rngs | None, frozenset[str]]:
    """The streams that a wrapper keeps, and the names of those made of plain keys.

    `rngs` is an `nnx.Rngs`, which is forked, a key, a mapping of keys by name, or None; anything
    else raises InvalidRngsError. The first draw of a stream is a key derived from its own, but
    Linen's `init` starts from the very key it is given.
    """
    if rngs is None:
        return None, frozenset()
    if isinstance(rngs, nnx.Rngs):
        return rngs.fork(), frozenset()
    streams = sources(rngs, where)
    plain = frozenset(name for name, key in streams.items() if not isinstance(key, nnx.RngStream))
    return nnx.Rngs(**{n: s if n in plain else s.fork() for n, s in streams.items()}), plain


def missing_stream(error: Exception) -> str | None:
    """The stream that an `nnx.Rngs` lacks for which this error was raised, None for another error.

    Flax's error has the name only in its text, so it is read from the call that raised it.
    """
    asked = nnx.Rngs.__getattr__.__code__, nnx.Rngs.__getitem__.__code__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in asked:
            return str(frame.f_locals[frame.f_code.co_varnames[1]])
    return None


def _is_source(value: object) -> bool:
    return isinstance(value, nnx.RngStream) or is_one_key(value)


def is_one_key(value: object) -> bool:
    """Whether a value is a single key, a typed one or its bits."""
    return isinstance(value, jax.Array) and _key_dimensions(value) == 0


def _key_dimensions(value: jax.Array) -> int:
    """How many dimensions an array of keys has; -1 for anything else."""
    if is_key(value):
        return value.ndim
    return value.ndim - 1 if value.dtype == jax.numpy.uint32 else -1


def _several_keys(rngs: object) -> str:
    """What to do where several keys were given for one."""
    keys = rngs.values() if isinstance(rngs, Mapping) else [rngs]
    if not any(isinstance(key, jax.Array) and _key_dimensions(key) > 0 for key in keys):
        return ""
    return (
        "that is an array of keys, as jax.random.split returns it; pass one of them, or make the"
        " wrapper inside the function that jax.vmap or nnx.vmap maps over them"
    )


def fold_path(key: jax.Array, path: tuple[Any, ...]) -> Any:
    """A typed key for the stream at a path below a ToLinen, another one for every path."""
    # As Linen folds names in, with a separator: without one, a/ba and ab/a would collide.
    folded = key
    if path:
        names = "".join(f"\0{name}" for name in path)
        digest = hashlib.sha1(names.encode(), usedforsecurity=False).digest()
        folded = jax.random.fold_in(key, int.from_bytes(digest[:4], "big"))
    return folded if is_key(folded) else jax.random.wrap_key_data(folded)


def stream_for(tag: str | None, rngs: Mapping[str, Any], *, is_stored: bool = True) -> str | None:
    """Which of the call's streams seeds a stream that was named `tag` when it was made.

    A module built from `nnx.Rngs(key)` has one stream, `default`, that stands for all. Of several
    keys it gets that of `dropout`, because most layers that draw in a call ask for it.

    `is_stored` says whether the variables have the stream; if so, `params` does not replace it.
    """
    names = set(rngs)
    # Iteration includes streams that another one replaces.
    if tag in rngs or tag in names:
        return tag
    others = sorted(names - {"params"})
    if tag == DEFAULT and others:
        return DROPOUT if DROPOUT in names else others[0]
    return "params" if "params" in names and not is_stored else None


def stream_of(address: tuple[str, tuple[Any, ...]], leaf: object) -> str | None:
    """The stream that a leaf is the key of: its tag, or the name it has in an `nnx.Rngs`."""
    collection, path = address
    if collection != registry.current().name_from_type(nnx.RngKey):
        return None
    metadata = getattr(leaf, "metadata", None) if isinstance(leaf, meta.AxisMetadata) else None
    return (metadata or {}).get("tag") or (str(path[-2]) if len(path) > 1 else None)
