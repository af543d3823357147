"""Notices that a checkpoint is replaced while it is read, so that nobody gets a mixture of two."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax

from bridge._errors import CheckpointError

_T = TypeVar("_T")

# What tells a directory or file from the one that takes its name; None in an object store.
Identity: TypeAlias = tuple[int, ...] | None
# A read that is disturbed this often is given up.
_TRIES = 10


class ReplacedError(CheckpointError):
    """A checkpoint was replaced or removed while it was read."""


def identity_of(path: Any) -> Identity:
    """What the directory or file at a path is, whatever its name."""
    try:
        found = os.stat(os.fspath(path))
    except OSError:
        return None
    # The system gives the number of a directory that was deleted to a new one.
    return found.st_dev, found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def unreplaced(path: Any, identity: Identity) -> Iterator[None]:
    """A block that reads parts of a checkpoint.

    Args:
      path: the checkpoint's.
      identity: what was at the path when the first part was read.

    Raises:
      ReplacedError: something else is there when the block ends. Errors of the block are its
        consequence then, and not shown.
    """
    try:
        yield
    except Exception:
        if identity_of(path) != identity:
            raise _replaced(path) from None
        raise
    if identity_of(path) != identity:
        raise _replaced(path)


def until_unreplaced(read: Callable[[], _T]) -> _T:
    """What `read` returns, which begins again when the checkpoint is replaced meanwhile.

    Raises:
      ReplacedError: the checkpoint was replaced each time, or one of several processes, which would
        begin again by itself, found it replaced.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except ReplacedError:
            if jax.process_count() > 1:
                raise
    return read()


def _replaced(path: Any) -> ReplacedError:
    return ReplacedError(
        "another program replaced or removed, while it was read, the checkpoint at",
        path,
        "Read it again. Nothing was changed in memory.",
    )
