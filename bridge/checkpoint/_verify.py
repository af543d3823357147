"""Compares the arrays of a checkpoint with the digests that were saved with them."""

from __future__ import annotations

import os
from typing import Any

from bridge._errors import CheckpointError

from . import _arrays, _digests
from ._failures import reported
from ._files import VARIABLES
from ._source import Source, read_from
from ._stored import Stored, batches, stored_in


def verify(path: str | os.PathLike[str]) -> int:
    """Reads every array of a checkpoint, and compares it with the digest that was saved with it.

    At most 256 MiB, or the largest array, are in memory at once.

    Args:
      path: the directory of a checkpoint that `save` or `save_args` wrote.

    Returns:
      The number of arrays; all of them agree with their digests.

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
        return read_from(path, _verified)


def _verified(source: Source) -> int:
    check_has_digests(source)
    problems: list[tuple[str, str]] = []
    count = 0
    for name, records in {VARIABLES: source.variables, **source.extra}.items():
        label = "" if name == VARIABLES else f"{name}: "
        stored = {s.location: s for s in stored_in(records).values() if s.is_read}
        for batch in batches([s] for s in stored.values()):
            locations = [each.location for each in batch]
            for location, value, reason in _arrays.each(*source.trees[name], locations):
                count += 1
                found = None if reason else f"{_digests.whole(value):016x}"
                if found != stored[location].digest:
                    text = reason or _changed(stored[location], str(found))
                    problems.append((label + _text(stored[location]), text))
    if problems:
        raise _damaged(source.path, problems)
    return count


def check_has_digests(source: Source) -> None:
    """Raises CheckpointError if a checkpoint has no digests, or says what it did not say."""
    trees = (source.variables, *source.extra.values())
    stored = [s for records in trees for s in stored_in(records).values()]
    if source.is_intact is None or any(s.is_read and s.digest is None for s in stored):
        raise CheckpointError(
            "there are no digests in the checkpoint at",
            source.path,
            "It was saved with digests=False, by an earlier version, or by something else. Read it"
            " without verify=True.",
        )
    if not source.is_intact:
        raise _damaged(source.path, [("the list of leaves", "it is not the one that was saved")])


def compare(source: Source) -> None:
    """Raises CheckpointError, on all processes, if an array that was read is not the one saved."""
    digests = source.digests or []
    texts = _digests.texts_of([part for _, part in digests])
    problems = [
        (_text(stored), _changed(stored, text))
        for (stored, _), text in zip(digests, texts, strict=True)
        if text != stored.digest
    ]
    if problems:
        raise _damaged(source.path, problems)


def _damaged(path: Any, problems: list[tuple[str, str]]) -> CheckpointError:
    return CheckpointError(
        "damage was found in the checkpoint at",
        path,
        "Restore an earlier checkpoint. Nothing was changed in memory.",
        unreadable=problems,
    )


def _changed(stored: Stored, found: str) -> str:
    return f"its digest is {found}, that of what was saved is {stored.digest}"


def _text(stored: Stored) -> str:
    return "/".join(map(str, stored.location))
