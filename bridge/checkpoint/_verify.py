"""Compares the arrays of a checkpoint with the digests that were saved with them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from bridge._errors import CheckpointError

from . import _digests
from ._failures import reported
from ._files import VARIABLES
from ._processes import summed
from ._replaced import until_unreplaced
from ._source import Item, Source, open_checkpoint
from ._stored import Stored

# How many bytes are read at once.
_BATCH = 2**28


def verify(path: str | os.PathLike[str]) -> int:
    """Reads every array of a checkpoint, and compares it with the digest that was saved with it.

    At most 256 MiB are in memory at once, or the largest array.

    Args:
      path: the directory of a checkpoint that `save` or `save_args` wrote.

    Returns:
      The number of arrays; all of them are what was saved.

    Raises:
      CheckpointNotFoundError: there is no checkpoint.
      CheckpointError: arrays are damaged or cannot be read (the error lists every one), or there
        are no digests.

    Example::

      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from bridge import checkpoint
      >>> path = pathlib.Path(tempfile.mkdtemp()) / 'model'
      >>> checkpoint.save(path, {'params': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}})
      >>> checkpoint.verify(path)
      2
    """
    with reported("no checkpoint can be verified at", path):
        return until_unreplaced(lambda: _verified(path))


def _verified(path: str | os.PathLike[str]) -> int:
    source = open_checkpoint(path)
    items = {VARIABLES: source.variables, **source.extra}
    _check_digests(source, [s for item in items.values() for s in item.stored.values()])
    problems: list[tuple[str, str]] = []
    count = 0
    for name, item in items.items():
        label = "" if name == VARIABLES else f"{name}: "
        for stored, value, reason in _read(item):
            count += 1
            found = reason or _difference(stored, value)
            if found:
                problems.append((label + _text(stored), found))
    if problems:
        raise _damaged(source.path, problems)
    return count


class Verification:
    """The digests of what is restored, of which each process has its part.

    Nothing is compared unless that is asked for.
    """

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._path: Any = None
        self._stored: list[Stored] = []
        self._parts: list[int] = []

    def begin(self, source: Source) -> None:
        """Raises CheckpointError if the checkpoint has no digests, or says what it did not say."""
        self._path = source.path
        if self._wanted:
            _check_digests(source, [])

    def add(self, stored: Iterable[Stored], values: Mapping[tuple[Any, ...], Any]) -> None:
        """Adds arrays that were read, by location, with what the checkpoint says of them."""
        if not self._wanted:
            return
        arrays = {array.location: array for entry in stored for array in entry.origins or (entry,)}
        for entry in arrays.values():
            if entry.location in values:
                _check_digest(self._path, [entry])
                self._stored.append(entry)
                self._parts.append(_digests.own_part(values[entry.location]))

    def end(self) -> None:
        """Raises CheckpointError, on all processes, if an array is another than the one saved."""
        if not self._wanted:
            return
        problems: list[tuple[str, str]] = []
        for entry, total in zip(
            self._stored, summed(np.asarray(self._parts, np.uint64)), strict=True
        ):
            found = _digests.text_of(int(total))
            if found != entry.digest:
                problems.append((_text(entry), _changed(entry, found)))
        if problems:
            raise _damaged(self._path, problems)


def _check_digests(source: Source, arrays: list[Stored]) -> None:
    if source.is_intact is None:
        raise _without_digests(source.path)
    if not source.is_intact:
        raise _damaged(source.path, [("the list of leaves", "it is not the one that was saved")])
    _check_digest(source.path, [stored for stored in arrays if stored.is_read])


def _check_digest(path: Any, arrays: list[Stored]) -> None:
    if any(stored.digest is None for stored in arrays):
        raise _without_digests(path)


def _without_digests(path: Any) -> CheckpointError:
    return CheckpointError(
        "there are no digests in the checkpoint at",
        path,
        "It was saved with digests=False, by an earlier version, or by something else. Read it"
        " without verify=True.",
    )


def _damaged(path: Any, problems: list[tuple[str, str]]) -> CheckpointError:
    return CheckpointError(
        "damage was found in the checkpoint at",
        path,
        "Restore an earlier checkpoint. Nothing was changed in memory.",
        unreadable=problems,
    )


def _read(item: Item) -> Iterator[tuple[Stored, Any, str | None]]:
    """Every array of a tree, with the reason if it cannot be read."""
    batch: dict[tuple[Any, ...], Stored] = {}
    size = 0
    for stored in item.stored.values():
        if not stored.is_read:
            continue
        own = _bytes_of(stored)
        if batch and size + own > _BATCH:
            yield from _read_batch(item, batch)
            batch, size = {}, 0
        batch[stored.location] = stored
        size += own
    yield from _read_batch(item, batch)


def _read_batch(
    item: Item, batch: Mapping[tuple[Any, ...], Stored]
) -> Iterator[tuple[Stored, Any, str | None]]:
    for location, value, reason in item.each(list(batch)):
        yield batch[location], value, reason


def _difference(stored: Stored, value: Any) -> str | None:
    array = np.asarray(value)
    found = _digests.text_of(_digests.whole(array))
    return None if found == stored.digest else _changed(stored, found)


def _changed(stored: Stored, found: str) -> str:
    return f"its digest is {found}, that of what was saved is {stored.digest}"


def _bytes_of(stored: Stored) -> int:
    # Keys have words of their own; no PRNG has more than four.
    width = 16 if stored.kind == "key" else jax.numpy.dtype(stored.dtype).itemsize
    return math.prod(stored.shape) * width


def _text(stored: Stored) -> str:
    return "/".join(map(str, stored.location))
