"""What is at a path: a checkpoint of the bridge, another orbax tree, a msgpack file, or none."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

# Orbax's own dependency, through which it reads and writes; it knows gs:// paths too.
from etils import epath

from bridge._errors import CheckpointError, CheckpointNotFoundError, mapping_error

# The items that a checkpoint of the bridge always has and may have.
NOTES = "bridge"
VARIABLES = "variables"
_TREE_FILE = "_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"


class Found(NamedTuple):
    """What is at a path.

    Attributes:
      path: the directory or file.
      format: `bridge`, `orbax` or `msgpack`.
    """

    path: Any
    format: str


def absolute(path: str | os.PathLike[str]) -> Any:
    """A path as orbax takes it.

    Raises:
      ConversionError: it is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise mapping_error(
            path, "a path", "it comes first: save(path, tree), restore(path, target)"
        )
    found = epath.Path(path)
    return found if found.is_absolute() else epath.Path(os.path.abspath(os.fspath(path)))


def find(path: str | os.PathLike[str]) -> Found:
    """The checkpoint at a path.

    Args:
      path: a directory or file; a step of a `CheckpointManager` that has one item will do.

    Raises:
      CheckpointNotFoundError: there is none; the error names what is there instead.
      CheckpointError: it was never finished.
    """
    where = absolute(path)
    if where.is_dir() and not ocp.utils.is_checkpoint_finalized(where):
        raise CheckpointError(
            "there is an unfinished save at", where, "Restore a checkpoint that was finished."
        )
    if where.is_file():
        return Found(where, "msgpack")
    if not where.is_dir():
        raise _nothing_at(where)
    if (where / NOTES).is_dir():
        return Found(where, "bridge")
    if (where / _TREE_FILE).exists():
        return Found(where, "orbax")
    items = sorted(child.name for child in where.iterdir() if (child / _TREE_FILE).exists())
    if len(items) == 1:
        return Found(where / items[0], "orbax")
    if items:
        raise CheckpointNotFoundError(
            "there are several trees in", where, f"Give the path of one of them: {items}."
        )
    raise _nothing_at(where)


def _nothing_at(where: Any) -> CheckpointNotFoundError:
    if where.is_dir():
        inside = sorted(child.name for child in where.iterdir())
        unfinished = [name for name in inside if _UNFINISHED in name]
        others = [name for name in inside if name not in unfinished]
        remedy = f"It holds {others}; give the path of one of these." if others else ""
    else:
        parent = where.parent
        beside = [child.name for child in parent.iterdir()] if parent.is_dir() else []
        unfinished = sorted(name for name in beside if name.startswith(where.name + "."))
        remedy = f"In {parent} there is no {where.name}."
    if unfinished:
        remedy += f" A save that was interrupted left {unfinished}."
    return CheckpointNotFoundError("there is no checkpoint at", where, remedy.strip())
