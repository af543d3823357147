"""Finds what is at a path: a checkpoint of the bridge, another orbax tree, a file, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from bridge._errors import CheckpointError, CheckpointNotFoundError, did_you_mean

from . import _single_files
from ._paths import absolute, is_remote, latest_step, place_of, set_aside

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

    Raises CheckpointNotFoundError if there is none, which names what is there instead, and
    CheckpointError if it was never finished or lacks the index that orbax writes.
    """
    where = latest_step(absolute(path))
    if not is_remote(where):
        where = absolute(set_aside(Path(os.fspath(where))) or where)
    if where.is_dir() and not ocp.utils.is_checkpoint_finalized(where):
        raise CheckpointError(
            "there is an unfinished save at", where, "Restore a checkpoint that was finished."
        )
    if not is_remote(where) and _is_special(Path(os.fspath(where))):
        # Opening a named pipe would wait for a writer.
        raise CheckpointNotFoundError(
            "there is something that is not a checkpoint at",
            where,
            "It is neither a directory nor a file.",
        )
    if (form := _form_of(where)) is not None:
        return Found(where, form)
    if where.is_file():
        raise CheckpointNotFoundError(
            "there is a file that is not a checkpoint at",
            where,
            "It is neither msgpack of flax.serialization nor safetensors nor npz.",
        )
    if not where.is_dir():
        raise _nothing_at(where)
    inside = _inside(where)
    if len(inside) == 1 and inside[0].format == "orbax":
        return inside[0]
    if len(inside) > 1:
        kinds: dict[str, list[str]] = {}
        for found in inside:
            kinds.setdefault(found.format, []).append(found.path.name)
        texts = ", ".join(f"{kind} {_few(names)}" for kind, names in kinds.items())
        raise CheckpointNotFoundError(
            "there are several checkpoints in", where, f"Give the path of one of them: {texts}."
        )
    for place in (where, *where.iterdir()):
        if place.is_dir() and any((place / name).exists() for name in _BESIDE_INDEX):
            raise CheckpointError(
                f"the file {TREE_FILE}, which says what the arrays are, is missing from the"
                " checkpoint of orbax at",
                place,
                "Copy the whole directory again, or restore an earlier checkpoint.",
            )
    raise _nothing_at(where)


def _inside(where: Any) -> list[Found]:
    """The checkpoints in a directory, by name."""
    found = []
    for child in sorted(where.iterdir()):
        # A child that may not be read does not count.
        with contextlib.suppress(OSError):
            if _UNFINISHED not in child.name and (form := _form_of(child)) is not None:
                found.append(Found(child, form))
    return found


def _form_of(where: Any) -> str | None:
    """The format of the checkpoint at a path, as in `Found`; None if there is none."""
    if where.is_file():
        return _single_files.format_of(where)
    if _is_own(where):
        return "bridge"
    return "orbax" if (where / TREE_FILE).exists() else None


def _is_own(where: Any) -> bool:
    """Whether a directory is a checkpoint of the bridge, and not one in which a `bridge` lies."""
    notes = where / NOTES
    has_notes = (notes / NOTES_FILE).exists() or (where / ITEMS_FILE).exists()
    return notes.is_dir() and has_notes and not (notes / TREE_FILE).exists()


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a directory nor a file."""
    return path.exists() and not (path.is_dir() or path.is_file())


def _nothing_at(where: Any) -> CheckpointNotFoundError:
    unfinished: list[str] = []
    if where.is_dir():
        inside = sorted(child.name for child in where.iterdir())
        unfinished = [name for name in inside if _UNFINISHED in name]
        others = [name for name in inside if name not in unfinished]
        few = _few(others)
        remedy = f"It holds {few}; give the path of one of these." if others else "It is empty."
    else:
        remedy = f"In {where.parent} there is no {where.name}."
        if where.parent.is_dir():
            beside = [child.name for child in where.parent.iterdir()]
            unfinished = sorted(name for name in beside if name.startswith(where.name + "."))
            others = [name for name in beside if name not in unfinished and name[0] != "."]
            if where.name in others:
                remedy = "It is a link to what is not there."
            else:
                remedy = f"{remedy} {did_you_mean(where.name, others)}".rstrip()
        place = place_of(where)
        unfinished += [place.name] if place.exists() else []
    if unfinished:
        remedy += f" A save that was interrupted left {unfinished}."
    return CheckpointNotFoundError("there is no checkpoint at", where, remedy.strip())


def _few(names: Sequence[str]) -> str:
    return f"{names[:_FEW]}" + (f" and {len(names) - _FEW} more" if names[_FEW:] else "")
