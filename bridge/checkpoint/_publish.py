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

from bridge._errors import CheckpointError

from ._failures import agreed, quiet_orbax, reason, reported
from ._overwrite_guard import check, check_content
from ._paths import NEW, OLD, REPLACED, absolute, is_remote, place_of

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
            # Orbax marks a checkpoint in an object store as complete at last.
            _check_free(where)
            with quiet_orbax():
                yield where
            return
        own = Path(os.fspath(where))
        # A name that ends in two dots has no name beside it.
        own = own.resolve() if own.name == ".." else own
        publication = _Publication(own, overwrite, file_format)
        is_first = jax.process_index() == 0
        try:
            with agreed(own, _FAILURE):
                if is_first:
                    publication.open(sources)
            with agreed(own, _FAILURE), quiet_orbax():
                yield absolute(place_of(own) / NEW)
            with agreed(own, _FAILURE):
                if is_first:
                    publication.publish()
        except BaseException:
            publication.close()
            raise
        with agreed(own, _FAILURE):
            publication.close()


class _Publication:
    """One checkpoint on its way to its path."""

    _is_published = False

    def __init__(self, path: Path, overwrite: bool, file_format: str | None):
        self._path = path
        self._place = place_of(path)
        self._new, self._old, self._replaced = (self._place / n for n in (NEW, OLD, REPLACED))
        self._overwrite = overwrite
        self._file_format = file_format
        self._undo = contextlib.ExitStack()
        self.close = self._undo.close

    def open(self, sources: Sequence[str | os.PathLike[str]]) -> None:
        """Makes the directory beside the path, if what is at the path may be replaced."""
        for folder in reversed([p for p in self._path.parents if not p.exists()]):
            folder.mkdir(exist_ok=True)
            self._undo.callback(_remove_empty, folder)
        self._undo.enter_context(_hold(self._place))
        self._undo.callback(self._clean)
        # All that is in it was left by a save that was killed.
        if os.path.lexists(self._old):
            if os.path.lexists(self._path):
                check_content(self._old, self._old)
            else:
                os.rename(self._old, self._path)
        for left in self._place.iterdir():
            _remove(left)
        if os.path.lexists(self._path):
            if not self._overwrite:
                raise _taken(self._path)
            check(self._path, self._file_format, sources)

    def publish(self) -> None:
        """Gives the new checkpoint its name."""
        _sync_tree(self._place)
        if os.path.lexists(self._path):
            if not self._overwrite:
                raise _taken(self._path)
            os.rename(self._path, self._old)
        try:
            if os.path.lexists(self._old):
                # Nobody else can reach it any more, so this finding holds until it is deleted.
                check_content(self._old, self._path)
            os.rename(self._new, self._path)
            _sync(self._path.parent)
        except BaseException as error:
            self._put_back(error)
            raise
        self._is_published = True

    def _put_back(self, error: BaseException) -> None:
        """Gives the old checkpoint its name again."""
        try:
            if not os.path.lexists(self._new) and os.path.lexists(self._path):
                os.rename(self._path, self._new)
            if os.path.lexists(self._old):
                os.rename(self._old, self._path)
        except OSError:
            left = [os.fspath(p) for p in (self._old, self._new) if os.path.lexists(p)]
            raise CheckpointError(
                "the last step of a save failed and could not be undone, at",
                self._path,
                f"The old and the new checkpoint are complete, in {' and '.join(left)}."
                " Rename one of them.",
            ) from error

    def _clean(self) -> None:
        """Removes the directory beside the path, but nothing that has no other place."""
        if self._is_published:
            with contextlib.suppress(OSError):
                # If this process is killed, the next save deletes the rest under this name.
                os.rename(self._old, self._replaced)
        elif os.path.lexists(self._old):
            return
        problem = _remove(self._place)
        if problem is not None and self._is_published:
            raise CheckpointError(
                "the new checkpoint is complete at",
                self._path,
                f"The old checkpoint could not be deleted, and lies in {self._place}: {problem}.",
            )


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(
        "there is something already at", path, "Pass overwrite=True to replace it."
    )


def _check_free(where: Any) -> None:
    if where.exists():
        raise CheckpointError(
            "there is something already at",
            where,
            "In an object store, which cannot rename, nothing is replaced. Save to another path, or"
            " remove it first.",
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


def _remove(place: Path) -> str | None:
    """Removes a file or directory; if that fails, why."""
    problem = None
    # Threads of a save that failed may still be writing.
    for pause in (0, 0.05, 0.3, 1):
        time.sleep(pause)
        try:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = reason(error)
        else:
            return None
    return problem


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
