"""The steps by which a directory or file takes another one's name, and reaches the disk."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

# From linux/fs.h.
_NO_REPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
# From sys/stdio.h of macOS.
_SWAP, _EXCLUSIVE = 2, 4

# How many files are brought to the disk at once.
_AT_ONCE = 16

# Errors of a kernel or file system without the call or the flag.
_MISSING = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class NoExchangeError(OSError):
    """The system cannot exchange two names in one step."""


def exchange(a: Path, b: Path) -> None:
    """Exchanges two names, in one step for every process that looks.

    Raises:
      NoExchangeError: the system cannot; nothing was changed.
      OSError: a name is gone, or the directory may not be changed; nothing was changed.
    """
    if not _flagged(a, b, _EXCHANGE, _SWAP):
        raise NoExchangeError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(a), None, str(b))


def move_to_free_name(source: Path, target: Path) -> None:
    """Renames to a name that nothing has.

    Raises:
      FileExistsError: something has it.
      OSError: the directory may not be changed.
    """
    if _flagged(source, target, _NO_REPLACE, _EXCLUSIVE):
        return
    if source.is_dir():
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        # A directory that appears in between is safe: a rename replaces only an empty directory.
        os.rename(source, target)
    else:
        os.link(source, target)
        os.unlink(source)


def sync_tree(root: Path) -> None:
    """Waits until a file, or a directory with all that is in it, is on the disk."""
    if root.is_file():
        _sync(root)
        return
    files: list[Path] = []
    folders: list[Path] = []
    for folder, _, names in os.walk(root):
        folders.append(Path(folder))
        files += (Path(folder) / name for name in names)
    # Each call waits for the disk, and a journal commits concurrent calls together.
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = [pool.submit(_sync, file) for file in files]
        waiting += [pool.submit(sync_directory, folder) for folder in folders]
        for done in waiting:
            done.result()


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    if os.name == "nt":
        return
    try:
        _sync(path)
    except OSError as error:
        # Some file systems have no such call for directories.
        if error.errno not in _MISSING:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flagged(a: Path, b: Path, linux: int, darwin: int) -> bool:
    """Renames with a flag; False if the system has no such call or flag."""
    call = _call()
    if call is None:
        return False
    if call(os.fsencode(a), os.fsencode(b), linux, darwin) == 0:
        return True
    code = ctypes.get_errno()
    if code in _MISSING:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


@functools.cache
def _call() -> Callable[[bytes, bytes, int, int], int] | None:
    """The C library's rename with flags, None if it has none; Python offers neither of them."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None
    if sys.platform == "linux":
        with_flags = getattr(library, "renameat2", None)
        if with_flags is not None:
            return lambda a, b, linux, _: with_flags(_AT_FDCWD, a, _AT_FDCWD, b, linux)
    if sys.platform == "darwin":
        with_flags = getattr(library, "renamex_np", None)
        if with_flags is not None:
            return lambda a, b, _, darwin: with_flags(a, b, darwin)
    return None
