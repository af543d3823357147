"""Puts a complete checkpoint at a path, in the place of nothing or of another checkpoint."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from bridge._errors import CheckpointError, warn

from ._failures import agreed, quiet_orbax, reported
from ._files import NEW, OLD, REPLACED, absolute, is_remote, place_of
from ._overwrite_guard import check, check_content

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_FAILURE = "could not save"
# How many files are brought to the disk at once.
_AT_ONCE = 16
# Errors of a file system that cannot bring a directory to the disk.
_MISSING = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def publishing(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    file_format: str | None = None,
    sources: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Any]:
    """A block that writes a checkpoint, which gets its name when the block ends.

    The new one is written to a directory beside `path` and brought to the disk. Then one rename
    takes the old one into that directory, and another one gives the new one its name. If a process
    is killed between the two, `find` reads the old checkpoint where it is, and the next save puts
    it back; it also removes what else was left. Saves to one path wait for each other. Yields the
    path to write to, where nothing is yet. Missing directories above `path` are made. `file_format`
    is that of the new checkpoint if it is a file. `sources` are read meanwhile, and are not
    replaced.

    Raises:
      CheckpointError: something is at `path` that is not replaced, or writing fails. What was at
        `path` is there, and nothing temporary is left; otherwise the error says where it is.
    """
    where = absolute(path)
    with reported("no checkpoint could be saved at", where, "What was there before is unchanged."):
        if is_remote(where):
            if where.exists():
                raise CheckpointError(
                    "there is something already at",
                    where,
                    "In an object store, which cannot rename, nothing is replaced. Save to another"
                    " path, or remove it first.",
                )
            # Orbax marks a checkpoint in an object store as complete at last.
            with quiet_orbax():
                yield where
            return
        own = Path(os.fspath(where))
        # A name that ends in two dots has no name beside it.
        own = own.resolve() if own.name == ".." else own
        place, is_first = place_of(own), jax.process_index() == 0
        with contextlib.ExitStack() as undo:
            with agreed(own, _FAILURE):
                if is_first:
                    _prepare(own, place, undo)
                    _check_free(own, overwrite)
                    if os.path.lexists(own):
                        check(own, file_format, sources)
            with agreed(own, _FAILURE), quiet_orbax():
                yield absolute(place / NEW)
            with agreed(own, _FAILURE):
                if is_first:
                    _replace(own, place, overwrite)


def _prepare(path: Path, place: Path, undo: contextlib.ExitStack) -> None:
    """Makes the directory beside the path, without what a save that was killed left in it."""
    for folder in reversed([p for p in path.parents if not p.exists()]):
        folder.mkdir(exist_ok=True)
        undo.callback(_remove_empty, folder)
    undo.enter_context(_hold(place))
    undo.callback(_clean, place)
    old = place / OLD
    if os.path.lexists(old):
        if os.path.lexists(path):
            check_content(old, old)
        else:
            os.rename(old, path)
    for left in place.iterdir():
        _remove(left)


def _replace(path: Path, place: Path, overwrite: bool) -> None:
    """Gives the new checkpoint its name: two renames, and both back if anything fails."""
    new, old = place / NEW, place / OLD
    _sync_tree(place)
    _check_free(path, overwrite)
    if os.path.lexists(path):
        os.rename(path, old)
    try:
        if os.path.lexists(old):
            # Nobody else can reach it any more, so this finding holds until it is deleted.
            check_content(old, path)
        os.rename(new, path)
        _sync(path.parent)
    except BaseException as error:
        try:
            if not os.path.lexists(new) and os.path.lexists(path):
                os.rename(path, new)
            if os.path.lexists(old):
                os.rename(old, path)
        except OSError:
            raise CheckpointError(
                "the last step of a save failed and could not be undone, at",
                path,
                f"What is complete of the old and the new checkpoint is in {old} and {new}."
                " Rename one of them.",
            ) from error
        raise
    if os.path.lexists(old):
        try:
            # If this process is killed, the next save deletes the rest under this name.
            os.rename(old, place / REPLACED)
        except OSError:
            _remove(old)


def _clean(place: Path) -> None:
    """Removes the directory beside the path, unless the old checkpoint is there alone."""
    if not os.path.lexists(place / OLD) and not _remove(place):
        warn(f"what a save no longer needs could not be deleted; it is in {place}")


def _check_free(path: Path, overwrite: bool) -> None:
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(
            "there is something already at", path, "Pass overwrite=True to replace it."
        )


def _hold(place: Path) -> contextlib.ExitStack:
    """Makes a directory and holds it until the stack is closed, or the process ends.

    Where the system has no locks, saves to one path must not run at once.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            place.mkdir()
        if fcntl is None:
            return contextlib.ExitStack()
        # Another save may remove the directory before this one holds it.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            descriptor = os.open(place, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                return contextlib.ExitStack()
            if os.path.samestat(os.fstat(descriptor), os.stat(place)):
                return stack.pop_all()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove(place: Path) -> bool:
    """Whether a file or directory could be removed."""
    # Threads of a save that failed may still be writing.
    for pause in (0, 0.05, 0.3, 1):
        time.sleep(pause)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
        if not os.path.lexists(place):
            return True
    return False


def _sync_tree(root: Path) -> None:
    """Waits until a directory with all that is in it is on the disk."""
    paths = [root, *root.rglob("*")]
    # Each call waits for the disk, and a journal commits concurrent calls together.
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
    finally:
        os.close(descriptor)
