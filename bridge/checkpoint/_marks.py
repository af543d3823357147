"""What at a path is a checkpoint and nothing else, by the files that its writer leaves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import _single_files

_ITEMS_FILE = "_CHECKPOINT_METADATA"
_TREE_FILE = "_METADATA"
_COMMITTED = "commit_success.txt"

# Every file that orbax writes for a tree, by its path in the tree's directory. A database has
# arrays in files with hexadecimal names; without it each array has a directory of its own, whose
# name is in the tree's file.
_TREE = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|checkpoint"
    r"|array_metadatas/process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]+)"
)
_ARRAY = re.compile(r"\.zarray|\.zattrs|zarr\.json|\d+(\.\d+)*|c(/\d+)*")


class NotACheckpointError(Exception):
    """What is at a path is not a checkpoint, or holds other things too; the text says what."""


def check_is_checkpoint(path: Path) -> str | None:
    """Finds out whether a checkpoint is at a path, and nothing but it.

    A directory is one if a file in it has the form of the index that orbax writes, and every file
    in it is one that this index calls for. A file is one if it is msgpack with arrays in the form
    that `flax.serialization` gives them, or safetensors or npz that the bridge wrote: data sets are
    npz files too.

    Args:
      path: a path that exists.

    Returns:
      The format of a file, None for a directory.

    Raises:
      NotACheckpointError: it is anything else.
    """
    if path.is_symlink():
        raise NotACheckpointError(f"a symbolic link to {os.readlink(path)}")
    if path.is_file():
        return _check_file(path)
    if not path.is_dir():
        raise NotACheckpointError("neither a directory nor a file")
    if (path / _TREE_FILE).is_file():
        _check_tree(path)
    elif (path / _ITEMS_FILE).is_file():
        _check_items(path)
    else:
        _refuse_directory(os.listdir(path))
    return None


def _check_items(path: Path) -> None:
    """Several trees in one directory: a checkpoint of the bridge, or a manager's step."""
    handlers = _json_of(path / _ITEMS_FILE).get("item_handlers")
    if not isinstance(handlers, Mapping) or not handlers:
        raise NotACheckpointError(f"a directory whose {_ITEMS_FILE} names no trees")
    if any(name in ("", ".", "..") or os.path.basename(name) != name for name in handlers):
        raise NotACheckpointError(f"a directory whose {_ITEMS_FILE} names what is not in it")
    others = set(os.listdir(path)) - handlers.keys() - {_ITEMS_FILE, _COMMITTED}
    if others:
        _refuse_directory(others)
    for child in (path / name for name in handlers):
        if child.is_symlink():
            raise NotACheckpointError(f"a directory in which {child.name} is a symbolic link")
        if (child / _TREE_FILE).is_file():
            _check_tree(child)
        elif child.is_dir():
            _check_document(child)
        elif child.exists():
            _refuse_directory([child.name])


def _check_tree(path: Path) -> None:
    """One orbax tree."""
    entries = _json_of(path / _TREE_FILE).get("tree_metadata")
    if not isinstance(entries, Mapping):
        raise NotACheckpointError(f"a directory whose {_TREE_FILE} is none of orbax's")
    arrays = set(_array_names(entries))
    others = [
        file
        for file in _files(path)
        if not _TREE.fullmatch(file)
        and not (file.partition("/")[0] in arrays and _ARRAY.fullmatch(file.partition("/")[2]))
    ]
    if others:
        _refuse_directory(others)


def _check_document(path: Path) -> None:
    """A directory with one JSON document."""
    files = [file for file in _files(path) if file != _COMMITTED]
    if len(files) != 1 or "/" in files[0]:
        _refuse_directory([f"{path.name}/{file}" for file in files])
    _json_of(path / files[0])


def _check_file(path: Path) -> str:
    try:
        form = _single_files.format_of(path)
        content = _single_files.read(path, form) if form else None
    except OSError:
        raise
    except Exception as error:
        raise NotACheckpointError("a file that is not a checkpoint") from error
    if not form or not isinstance(content, dict) or not any(map(_has_array, content.values())):
        raise NotACheckpointError("a file that is not a checkpoint")
    if not _single_files.is_own(path, form):
        raise NotACheckpointError(f"a {form} file that the bridge did not write")
    return form


def _has_array(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_array, value.values()))
    return isinstance(value, np.ndarray | np.generic)


def _array_names(entries: Mapping[str, Any]) -> Iterator[str]:
    for entry in entries.values():
        keys = entry.get("key_metadata", ()) if isinstance(entry, Mapping) else ()
        yield ".".join(str(key.get("key")) for key in keys if isinstance(key, Mapping))


def _files(root: Path) -> Iterator[str]:
    """Every file and link below a directory, by its path in it."""
    for folder, folders, files in os.walk(root):
        own = os.path.relpath(folder, root)
        prefix = "" if own == "." else own.replace(os.sep, "/") + "/"
        yield from (prefix + name for name in files)
        yield from (f"{prefix}{n}/" for n in folders if os.path.islink(os.path.join(folder, n)))


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotACheckpointError(f"a directory whose {path.name} is damaged") from error
    if not isinstance(content, dict):
        raise NotACheckpointError(f"a directory whose {path.name} is damaged")
    return content


def _refuse_directory(others: Any) -> None:
    names = sorted(others)
    if not names:
        raise NotACheckpointError("an empty directory")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise NotACheckpointError(
        f"a directory that is no checkpoint: it holds {', '.join(map(repr, names[:3]))}{more}"
    )
