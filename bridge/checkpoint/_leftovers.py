"""Directories beside a checkpoint in which it is written, and what killed programs left of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ._marks import NotACheckpointError, check_is_checkpoint

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What is in such a directory: the new checkpoint, the old one on its way out, and the old one when
# it was found to be a checkpoint and nothing else, and is being deleted.
NEW, OLD, REPLACED = "new", "old", "replaced"
# What orbax appends to the name of a directory until it is complete.
UNFINISHED = ".orbax-checkpoint-tmp"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def place_of(path: Path, token: int) -> Path:
    """The directory in which the checkpoint for a path is written."""
    return path.with_name(f".{path.name}.bridge-save-{_boot()}-{token:016x}")


def places(path: Path) -> Iterator[Path]:
    """The directories that there are for a path."""
    pattern = re.compile(re.escape(f".{path.name}.bridge-save-") + "[0-9a-f]*-[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        yield from sorted(p for p in path.parent.iterdir() if pattern.fullmatch(p.name))


def make(place: Path) -> int | None:
    """Makes a directory and holds it until the descriptor is closed, or the process ends.

    Returns:
      The descriptor; None if the system has no locks.
    """
    while True:
        place.mkdir()
        held = _lock(place, waits=True)
        # A sweep may have removed the directory, still empty, before this process held it.
        if fcntl is None or place.exists():
            return held
        if held is not None:
            os.close(held)


def _lock(place: Path, *, waits: bool) -> int | None:
    """Holds a directory.

    Returns:
      The descriptor; None if it is another's and this does not wait, if it is gone, or if the
      system has no locks.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(place, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sweep(path: Path) -> None:
    """Removes what processes that were killed left beside a path.

    A lock is known to one kernel only, so the directories of others are left alone, and those of
    before a restart. So is one that holds anything but checkpoints and what orbax had begun.
    """
    for place in places(path):
        is_local = bool(_boot()) and f"-{_boot()}-" in place.name
        held = _lock(place, waits=False) if is_local else None
        if held is not None:
            with contextlib.suppress(OSError):
                if all(map(_is_ours, place.iterdir())):
                    shutil.rmtree(place, ignore_errors=True)
            os.close(held)


def _is_ours(child: Path) -> bool:
    if child.name in (NEW + UNFINISHED, REPLACED):
        return True
    try:
        check_is_checkpoint(child)
    except NotACheckpointError:
        return False
    return child.name in (NEW, OLD)


def _boot() -> str:
    """What the kernel calls its present run; empty where it has no name for it."""
    try:
        return _BOOT.read_text().strip().replace("-", "")[:8]
    except OSError:
        return ""
