"""Puts a complete checkpoint at a path, in the place of nothing or of another checkpoint."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge._errors import CheckpointError

from ._failures import reason, reported
from ._orbax import quiet_orbax
from ._overwrite_guard import NotACheckpointError, check, check_is_checkpoint, check_remote
from ._paths import NEW, OLD, REPLACED, absolute, is_remote, place_of, places
from ._processes import Agreement, from_first, is_first

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
    takes the old one into that directory, and another one gives the new one its name. What was
    taken out is deleted if it is a checkpoint and nothing else, and put back otherwise. If a
    process is killed between the two renames, `find` reads the old checkpoint where it is, and the
    next save puts it back; it also removes what else was left.

    Args:
      path: where the checkpoint shall be. Missing directories above it are made.
      overwrite: whether a checkpoint that is there is replaced.
      file_format: the format of the new checkpoint if it is a file.
      sources: paths that are read meanwhile, and are not replaced.

    Yields:
      The path to write to. Nothing is there yet.

    Raises:
      CheckpointError: something is at `path` that is not replaced, or writing fails. What was at
        `path` is there, and nothing temporary is left; otherwise the error says where it is.
    """
    where = absolute(path)
    with reported("no checkpoint could be saved at", where, "What was there before is unchanged."):
        if is_remote(where):
            with _publishing_remotely(where, overwrite=overwrite) as new, quiet_orbax():
                yield new
            return
        own = Path(os.fspath(where))
        # A name that ends in two dots has no name beside it.
        own = own.resolve() if own.name == ".." else own
        place = place_of(own, from_first(secrets.randbits(64)))
        publication = _Publication(own, place, overwrite, file_format)
        try:
            with Agreement(own, _FAILURE):
                if is_first():
                    publication.open([Path(source) for source in sources])
            with Agreement(own, _FAILURE), quiet_orbax():
                yield absolute(place / NEW)
            with Agreement(own, _FAILURE):
                if is_first():
                    publication.publish()
        except BaseException:
            if is_first():
                publication.abandon()
            raise
        with Agreement(own, _FAILURE):
            if is_first():
                publication.close()


class _Publication:
    """One checkpoint on its way to its path."""

    def __init__(self, path: Path, place: Path, overwrite: bool, file_format: str | None):
        self._path = path
        self._new, self._old, self._replaced = (place / name for name in (NEW, OLD, REPLACED))
        self._place = place
        self._overwrite = overwrite
        self._file_format = file_format
        self._made: list[Path] = []
        self._lock: int | None = None
        self._has_moved = False

    def open(self, sources: Sequence[Path]) -> None:
        """Makes the directory beside the path, if what is at the path may be replaced."""
        _clear(self._path)
        if os.path.lexists(self._path):
            self._check_overwrite()
            check(self._path, self._file_format, sources)
        missing = [p for p in (self._path.parent, *self._path.parents) if not p.exists()]
        for folder in dict.fromkeys(reversed(missing)):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)
        while True:
            self._place.mkdir()
            self._lock = _lock(self._place, waits=True)
            # Another save may have removed the directory before this one held it.
            if self._place.exists():
                return
            self._unlock()

    def publish(self) -> None:
        """Gives the new checkpoint its name."""
        _sync_tree(self._place)
        try:
            while not self._has_moved:
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    # If another save is quicker, this one replaces what it has put there.
                    self._replace()
                if not (self._has_moved or os.path.lexists(self._new)):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._new)
            _sync_directory(self._path.parent)
        except BaseException:
            self._put_back()
            raise

    def _replace(self) -> None:
        if os.path.lexists(self._path):
            self._check_overwrite()
            if os.path.lexists(self._old):
                _remove(self._old)
            os.rename(self._path, self._old)
            try:
                # Nobody else can reach it any more, so this finding holds until it is deleted.
                check_is_checkpoint(self._old)
            except NotACheckpointError as error:
                raise CheckpointError(
                    f"there is {error} at", self._path, "It was left alone."
                ) from None
        _move_to_free_name(self._new, self._path)
        self._has_moved = True

    def _put_back(self) -> None:
        """Gives the old checkpoint its name again."""
        if self._has_moved:
            os.rename(self._path, self._new)
        if os.path.lexists(self._old):
            _move_to_free_name(self._old, self._path)

    def _check_overwrite(self) -> None:
        if not self._overwrite:
            raise taken(self._path)

    def close(self) -> None:
        """Removes the directory beside the path, with what was replaced."""
        with contextlib.suppress(OSError):
            # If this process is killed, the next save deletes the rest under this name.
            os.rename(self._old, self._replaced)
        problem = _remove(self._place)
        self._unlock()
        if problem is not None:
            raise CheckpointError(
                "the new checkpoint is complete at",
                self._path,
                f"What it replaces could not be deleted, and lies in {self._place}: {problem}.",
            )

    def abandon(self) -> None:
        """Removes what was made, but nothing that has no other place."""
        try:
            if os.path.lexists(self._old):
                left = [os.fspath(p) for p in (self._old, self._new) if os.path.lexists(p)]
                raise CheckpointError(
                    "the last step of a save failed, and could not be taken back, at",
                    self._path,
                    f"Complete are what was there and the new checkpoint, in {' and '.join(left)}."
                    " Rename one of them.",
                )
            if self._place.exists():
                _remove(self._place)
        finally:
            self._unlock()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def _publishing_remotely(where: Any, *, overwrite: bool) -> Iterator[Any]:
    """The same for an object store, which has no directories and cannot rename in one step.

    Where nothing is, orbax writes to the path itself and marks the checkpoint as complete at last.
    Otherwise both checkpoints are there, under one name or another, until the new one has the path.
    """
    exists = where.exists()
    if exists and not overwrite:
        raise taken(where)
    if not exists:
        yield where
        return
    check_remote(where)
    token = from_first(secrets.randbits(64))
    new, old = (where.with_name(f"{where.name}.bridge-{n}-{token:016x}") for n in ("new", "old"))
    try:
        yield new
    except BaseException:
        if is_first() and new.exists():
            new.rmtree()
        raise
    with Agreement(where, _FAILURE):
        if is_first():
            where.rename(old)
            try:
                new.rename(where)
            except Exception as error:
                raise CheckpointError(
                    "a save was interrupted at",
                    where,
                    f"What was there is complete in {old}, the new checkpoint in {new}.",
                ) from error
            old.rmtree()


def taken(path: Any) -> CheckpointError:
    """The error for a path at which something is that the user did not want to replace."""
    return CheckpointError(
        "there is something already at", path, "Pass overwrite=True to replace it."
    )


def _clear(path: Path) -> None:
    """Puts back and removes what saves that were killed left beside a path."""
    for place in places(path):
        held = _lock(place, waits=False)
        if held is None:
            continue
        try:
            old = place / OLD
            if os.path.lexists(old) and not os.path.lexists(path):
                os.rename(old, path)
            elif os.path.lexists(old):
                check_is_checkpoint(old)
            shutil.rmtree(place, ignore_errors=True)
        except (OSError, NotACheckpointError):
            # It holds what is not ours.
            continue
        finally:
            os.close(held)


def _lock(place: Path, *, waits: bool) -> int | None:
    """Holds a directory until the descriptor is closed, or the process ends.

    Returns:
      The descriptor; None if another process has it and this one does not wait, if it is gone, or
      if the system has no locks.
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


def _move_to_free_name(source: Path, target: Path) -> None:
    """Renames to a name that nothing has.

    Raises:
      FileExistsError: something has it.
      OSError: the directory may not be changed.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        if source.is_file():
            # A rename would replace a file that appears in between.
            os.link(source, target)
            os.unlink(source)
        else:
            os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None


def _remove(place: Path) -> str | None:
    """Removes a file or directory; if that fails, why."""
    problem = None
    # Threads of a save that failed may still be writing.
    for pause in (0, 0.05, 0.3, 1):
        time.sleep(pause)
        try:
            if place.is_dir():
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
    files: list[Path] = []
    folders: list[Path] = []
    for folder, _, names in os.walk(root):
        folders.append(Path(folder))
        files += (Path(folder) / name for name in names)
    # Each call waits for the disk, and a journal commits concurrent calls together.
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_sync, files))
        list(pool.map(_sync_directory, folders))


def _sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    if os.name == "nt":
        return
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in _MISSING:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
