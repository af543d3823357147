"""The paths of a checkpoint: as the user gives it, and of the directory beside it for a save."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# Orbax's own dependency, through which it reads and writes; it knows gs:// paths too.
from etils import epath

from bridge._errors import CheckpointError, CheckpointNotFoundError, mapping_error

LATEST = "latest"
# `100` and `step_100` of a CheckpointManager, `checkpoint_100` of flax.training.
_STEP = re.compile(r"(?P<prefix>.*[^\d.])?(?P<number>\d+(\.\d+)?)")

# What is in the directory beside a path: the new checkpoint; the old one, which is read until the
# new one has the path; and the old one while it is deleted.
NEW, OLD, REPLACED = "new", "old", "replaced"


def absolute(path: str | os.PathLike[str]) -> Any:
    """A path as orbax takes it.

    Raises ConversionError if it is no path, and CheckpointError if it leads to a storage that
    nothing here can read.
    """
    if isinstance(path, str) and not path:
        raise mapping_error(path, "a path", "'.' is the current directory")
    if not isinstance(path, str | os.PathLike):
        raise mapping_error(
            path, "a path", "it comes first: save(path, tree), restore(path, target)"
        )
    try:
        found = epath.Path(os.path.expanduser(path))
    except KeyError as error:
        raise CheckpointError(
            "there is no library for paths such as", path, f"It begins with {error}."
        ) from None
    return found if found.is_absolute() else epath.Path(os.path.abspath(os.fspath(found)))


def is_remote(path: Any) -> bool:
    """Whether a path leads to an object store."""
    return "://" in os.fspath(path)


def latest_step(where: Any) -> Any:
    """The path that one with `latest` in it means; any other path as it is.

    A path inside the step may follow `latest`, such as an item of a manager. A step with an empty
    directory was never written, and does not count. Raises CheckpointNotFoundError if the directory
    has no steps, or steps under several names.
    """
    if LATEST not in where.parts or where.exists():
        return where
    parent = latest_step(where.parent)
    if where.name != LATEST or not parent.is_dir():
        return parent / where.name
    steps: dict[str, list[tuple[float, Any]]] = {}
    for child in parent.iterdir():
        match = _STEP.fullmatch(child.name)
        if match and not _is_empty(child):
            steps.setdefault(match["prefix"] or "", []).append((float(match["number"]), child))
    if not steps:
        raise CheckpointNotFoundError("there are no steps in", parent, "Give another path.")
    if len(steps) > 1:
        names = sorted(f"{prefix}..." for prefix in steps)
        raise CheckpointNotFoundError(
            "there are steps under several names in", parent, f"They begin with {names}."
        )
    (own,) = steps.values()
    return max(own, key=lambda step: step[0])[1]


def _is_empty(step: Any) -> bool:
    return step.is_dir() and next(iter(step.iterdir()), None) is None


def place_of(path: Path) -> Path:
    """The directory beside a path in which a save writes the checkpoint."""
    return path.with_name(f".{path.name}.bridge-save")


def set_aside(path: Path) -> Path | None:
    """Where the checkpoint of a path is while a save has taken it away, and none is at the path."""
    if os.path.lexists(path):
        return None
    old = place_of(path) / OLD
    return old if old.exists() else None
