"""Puts a complete checkpoint at a path, in the place of nothing or of another checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge._errors import CheckpointError

from . import _leftovers, _remote
from ._failures import quiet_orbax, reason, reported
from ._files import absolute, is_remote
from ._leftovers import NEW, OLD, REPLACED
from ._marks import NotACheckpointError, check_is_checkpoint
from ._processes import Agreement, from_first, is_first
from ._refusals import check
from ._rename import NoExchangeError, exchange, move_to_free_name, sync_directory, sync_tree

_FAILURE = "could not save"


@contextlib.contextmanager
def publishing(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    file_format: str | None = None,
    sources: Sequence[str | os.PathLike[str]] = (),
) -> Iterator[Any]:
    """A block that writes a checkpoint, which gets its name when the block ends.

    The new one is written to a directory beside `path`, brought to the disk, and exchanged with
    what is there in one step. What is taken out is deleted when it was found to be a checkpoint and
    nothing else. A process that is killed leaves the old or the new checkpoint at `path`, and a
    hidden directory beside it that the next save removes. Where the system cannot exchange names,
    there is a moment between two renames at which both lie in that directory, and nothing at
    `path`; `find` says so.

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
            with _remote.publishing(where, overwrite=overwrite) as place, quiet_orbax():
                yield place
            return
        own = Path(os.fspath(where))
        # A name that ends in two dots has no name beside it.
        own = own.resolve() if own.name == ".." else own
        publication = _Publication(own, overwrite, file_format, [Path(p) for p in sources])
        with Agreement(own, _FAILURE):
            if is_first():
                publication.check()
                publication.open()
        publication.token = from_first(publication.token)
        try:
            with Agreement(own, _FAILURE), quiet_orbax():
                yield absolute(publication.place / NEW)
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
    """One checkpoint on its way to its path.

    Attributes:
      token: a random number in the name of the directory beside the path.
    """

    def __init__(self, path: Path, overwrite: bool, file_format: str | None, sources: list[Path]):
        self.token = secrets.randbits(64)
        self._path = path
        self._overwrite = overwrite
        self._file_format = file_format
        self._sources = sources
        self._made: list[Path] = []
        self._lock: int | None = None
        # What the directory beside the path holds and a save must preserve.
        self._kept: dict[str, str] = {}

    @property
    def place(self) -> Path:
        """The directory beside the path."""
        return _leftovers.place_of(self._path, self.token)

    def check(self) -> None:
        """Raises if something is at the path that is not to be replaced."""
        if not os.path.lexists(self._path):
            return
        if not self._overwrite:
            raise _taken(self._path)
        check(self._path, self._file_format, self._sources)

    def open(self) -> None:
        """Makes the directory beside the path, and those above it that are missing."""
        try:
            missing = [p for p in (self._path.parent, *self._path.parents) if not p.exists()]
            for folder in dict.fromkeys(reversed(missing)):
                folder.mkdir(exist_ok=True)
                self._made.append(folder)
            self._lock = _leftovers.make(self.place)
        except BaseException:
            self.abandon()
            raise

    def publish(self) -> None:
        """Gives the new checkpoint its name."""
        new = self.place / NEW
        sync_tree(new)
        sync_directory(self.place)
        while True:
            try:
                if os.path.lexists(self._path):
                    self.check()
                    self._replace(new)
                else:
                    self._move(new)
            except (FileExistsError, FileNotFoundError):
                # Another program has put something there, or has taken away what was there.
                if not os.path.lexists(new):
                    raise
            else:
                break

    def _move(self, new: Path) -> None:
        """Gives the new checkpoint a name that nothing has."""
        move_to_free_name(new, self._path)
        try:
            sync_directory(self._path.parent)
        except BaseException:
            move_to_free_name(self._path, new)
            raise

    def _replace(self, new: Path) -> None:
        """Gives the new checkpoint the name of the old one."""
        try:
            exchange(new, self._path)
        except NoExchangeError:
            self._replace_in_two_steps(new)
            return
        try:
            # Nobody else can reach it any more, so this finding holds until it is deleted.
            self._check_taken(new)
            sync_directory(self._path.parent)
        except BaseException:
            self._kept = {NEW: "what was at that path"}
            exchange(new, self._path)
            self._kept = {}
            raise

    def _replace_in_two_steps(self, new: Path) -> None:
        old = self.place / OLD
        os.rename(self._path, old)
        try:
            self._kept = {OLD: "what was at that path", NEW: "the new checkpoint"}
            self._check_taken(old)
            self._move(new)
        except BaseException:
            move_to_free_name(old, self._path)
            self._kept = {}
            raise
        self._kept = {}

    def _check_taken(self, old: Path) -> None:
        try:
            check_is_checkpoint(old)
        except NotACheckpointError as error:
            raise CheckpointError(
                f"there is {error} at", self._path, "It was left alone."
            ) from None

    def close(self) -> None:
        """Removes the directory beside the path, with what was replaced."""
        with contextlib.suppress(OSError):
            # If this process is killed, the next save deletes the rest under this name.
            os.rename(
                self.place / (OLD if (self.place / OLD).exists() else NEW), self.place / REPLACED
            )
        problem = _remove(self.place)
        self._unlock()
        if problem is not None:
            raise CheckpointError(
                "the new checkpoint is complete at",
                self._path,
                f"What it replaces could not be deleted, and lies in {self.place}: {problem}.",
            )
        _leftovers.sweep(self._path)

    def abandon(self) -> None:
        """Removes what was made, but nothing that has no other place."""
        if self._kept:
            left = ", ".join(f"{what} in {self.place / name}" for name, what in self._kept.items())
            raise CheckpointError(
                "the last step of a save failed, and could not be taken back, at",
                self._path,
                f"Complete are {left}. Rename one of them.",
            )
        _remove(self.place)
        self._unlock()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(
        "there is something already at", path, "Pass overwrite=True to replace it."
    )


def _remove(place: Path) -> str | None:
    """Removes a directory; if that fails, why."""
    problem = None
    # Threads of a save that failed may still be writing.
    for pause in (0, 0.05, 0.3, 1):
        time.sleep(pause)
        try:
            shutil.rmtree(place)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = reason(error)
        else:
            return None
    return problem
