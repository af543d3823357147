"""What a checkpoint never replaces: all that is not one, and what is stood in or read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from bridge._errors import CheckpointError

from . import _remote
from ._failures import reported
from ._files import absolute, is_remote
from ._latest import latest_step
from ._marks import NotACheckpointError, check_is_checkpoint


def check_replaceable(
    path: str | os.PathLike[str],
    *,
    file_format: str | None = None,
    sources: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Raises CheckpointError if what is at a path is not a checkpoint that may be replaced.

    Args:
      path: a path at which something is.
      file_format: the format of the file that is to take its place; None for a directory.
      sources: paths that are read meanwhile.
    """
    where = absolute(path)
    with reported("no checkpoint can be saved at", where):
        if is_remote(where):
            _remote.check_replaceable(where)
        else:
            check(Path(os.fspath(where)), file_format, [Path(p) for p in sources])


def check(path: Path, file_format: str | None, sources: Sequence[Path]) -> None:
    """The same for a path of this machine, without a net for errors of the system."""
    found = _why_not(path, file_format, sources)
    if found:
        raise CheckpointError(
            f"there is {found} at",
            path,
            "Only a checkpoint and nothing else is replaced. Save to another path, or remove it"
            " first.",
        )


def _why_not(path: Path, file_format: str | None, sources: Sequence[Path]) -> str | None:
    """What is at a path that may not be replaced, None if it may be."""
    if not path.is_symlink():
        if _is_at_or_above(path, Path.cwd()):
            return "the current directory, or one above it,"
        for source in (Path(os.fspath(latest_step(absolute(source)))) for source in sources):
            if _is_at_or_above(path, source) or _is_at_or_above(source, path):
                return f"the checkpoint that is read, or what holds it or lies in it ({source}),"
    try:
        found = check_is_checkpoint(path)
    except NotACheckpointError as error:
        return str(error)
    if found == file_format:
        return None
    return "a checkpoint directory" if found is None else f"a checkpoint that is a {found} file"


def _is_at_or_above(path: Path, other: Path) -> bool:
    """Whether a path is another one or holds it, by whatever names both go."""
    try:
        own, below = os.stat(path), other.resolve()
    except OSError:
        return False
    for candidate in (below, *below.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(own, os.stat(candidate)):
                return True
    return False
