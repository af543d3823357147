"""Finds what is at a path: a checkpoint of the bridge, another orbax tree, a file, or nothing.

While a save replaces a checkpoint, the old one is in a directory beside the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

# Orbax's own dependency, through which it reads and writes; it knows gs:// paths too.
from etils import epath

from bridge._errors import CheckpointError, CheckpointNotFoundError, did_you_mean, mapping_error

from . import _single_files

# The items that a checkpoint of the bridge always has and may have.
NOTES = "bridge"
VARIABLES = "variables"
NOTES_FILE = "metadata"
# The index that orbax writes of one tree, and that of several; what it writes last in some stores.
TREE_FILE = "_METADATA"
ITEMS_FILE = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
# What orbax writes beside the index of a tree.
_BESIDE_INDEX = ("manifest.ocdbt", "array_metadatas", "_sharding")
# What orbax appends to the name of a directory until it is complete.
_UNFINISHED = ".orbax-checkpoint-tmp"
# More names than these hide the sentence that they stand in.
_FEW = 12
LATEST = "latest"
# `100` and `step_100` of a CheckpointManager, `checkpoint_100` of flax.training.
_STEP = re.compile(r"(?P<prefix>.*[^\d.])?(?P<number>\d+(\.\d+)?)")

# What is in the directory beside a path: the new checkpoint; the old one, which is read until the
# new one has the path; and the old one while it is deleted.
NEW, OLD, REPLACED = "new", "old", "replaced"


class Found(NamedTuple):
    """What is at a path.

    `format` is `bridge`, `orbax`, or one of a single file: `msgpack`, `safetensors`, `npz`.
    """

    path: Any
    format: str


def find(path: str | os.PathLike[str]) -> Found:
    """The checkpoint at a path.

    The path of a step of a `CheckpointManager` that has one item will do, and `latest` in the place
    of a step, also before the name of an item. A checkpoint that a save has taken away, and not yet
    replaced, is found where it is meanwhile.

    Raises CheckpointNotFoundError if there is none, which says what is there instead, and
    CheckpointError if it was never finished.
    """
    where = latest_step(absolute(path))
    if not is_remote(where):
        old = place_of(Path(os.fspath(where))) / OLD
        where = absolute(old) if not os.path.lexists(where) and old.exists() else where
    if where.is_dir() and not ocp.utils.is_checkpoint_finalized(where):
        raise CheckpointError(
            "there is an unfinished save at", where, "Restore a checkpoint that was finished."
        )
    if (form := _form_of(where)) is not None:
        return Found(where, form)
    if where.is_dir():
        children = [child for child in where.iterdir() if _UNFINISHED not in child.name]
        inside = [Found(child, form) for child in children if (form := _form_of(child))]
        if [found.format for found in inside] == ["orbax"]:
            return inside[0]
        remedy = _content(sorted(child.name for child in where.iterdir()))
    elif where.exists():
        remedy = (
            "What is there is not a checkpoint: no directory, and no msgpack, safetensors or npz."
        )
    else:
        remedy = _neighbours(where)
    raise CheckpointNotFoundError("there is no checkpoint at", where, remedy)


def _form_of(where: Any) -> str | None:
    """The format of the checkpoint at a path, as in `Found`; None if there is none."""
    if where.is_file():
        # Etils calls a named pipe a file; opening one would wait for a writer.
        is_special = not is_remote(where) and not os.path.isfile(where)
        return None if is_special else _single_files.format_of(where)
    notes = where / NOTES
    has_notes = (notes / NOTES_FILE).exists() or (where / ITEMS_FILE).exists()
    # Any checkpoint may be called `bridge` itself.
    if notes.is_dir() and has_notes and not (notes / TREE_FILE).exists():
        return "bridge"
    return "orbax" if (where / TREE_FILE).exists() else None


def _content(names: Sequence[str]) -> str:
    """What to do about a directory that is not a checkpoint."""
    if not names:
        return "It is empty."
    if set(names).intersection(_BESIDE_INDEX):
        return (
            f"The file {TREE_FILE}, which says what the arrays are, is missing. Copy the whole"
            " directory again, or restore an earlier checkpoint."
        )
    more = f" and {len(names) - _FEW} more" if names[_FEW:] else ""
    return f"It holds {names[:_FEW]}{more}; give the path of one of these."


def _neighbours(where: Any) -> str:
    """What is beside a path at which there is nothing."""
    beside = [child.name for child in where.parent.iterdir()] if where.parent.is_dir() else []
    if where.name in beside:
        return "It is a link to what is not there."
    question = did_you_mean(where.name, (name for name in beside if name[0] != "."))
    left = [name for name in beside if name.startswith((f"{where.name}.", place_of(where).name))]
    interrupted = f" A save that was interrupted left {left}." if left else ""
    return f"In {where.parent} there is no {where.name}. {question}".rstrip() + interrupted


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
        # An empty directory is a step that was never written.
        if match and not (child.is_dir() and next(iter(child.iterdir()), None) is None):
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


def place_of(path: Path) -> Path:
    """The directory beside a path in which a save writes the checkpoint."""
    return path.with_name(f".{path.name}.bridge-save")
