"""What a save never replaces: all that is not a checkpoint, and what is stood in or read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bridge._errors import CheckpointError

from . import _single_files
from ._failures import reported
from ._files import COMMITTED, ITEMS_FILE, TREE_FILE, find
from ._paths import absolute, is_remote, latest_step

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
            check_remote(where)
        else:
            check(Path(os.fspath(where)), file_format, [Path(p) for p in sources])


def check_remote(where: Any) -> None:
    """The same for a path of an object store."""
    if find(where).path != where:
        raise CheckpointError("there is a directory that is no checkpoint at", where, "Remove it.")


def check(path: Path, file_format: str | None, sources: Sequence[Path]) -> None:
    """The same for a path of this machine, without a net for errors of the system."""
    found = _what_is_in_use(path, sources)
    try:
        form = None if found else check_is_checkpoint(path)
    except NotACheckpointError as error:
        found = str(error)
    else:
        if not found and form != file_format:
            found = f"a checkpoint that is a {form} file" if form else "a checkpoint directory"
    if found:
        raise CheckpointError(
            f"there is {found} at",
            path,
            "Only a checkpoint and nothing else is replaced. Save to another path, or remove it"
            " first.",
        )


def _what_is_in_use(path: Path, sources: Sequence[Path]) -> str | None:
    if path.is_symlink():
        return None
    if _is_at_or_above(path, Path.cwd()):
        return "the current directory, or one above it,"
    for source in (Path(os.fspath(latest_step(absolute(source)))) for source in sources):
        if _is_at_or_above(path, source) or _is_at_or_above(source, path):
            return f"the checkpoint that is read, or what holds it or lies in it ({source}),"
    return None


def _is_at_or_above(path: Path, other: Path) -> bool:
    """Whether a path is another one or holds it, by whatever names both go."""
    below = other.resolve()
    candidates = [p for p in (path, below, *below.parents) if os.path.exists(p)]
    return candidates[:1] == [path] and any(map(path.samefile, candidates[1:]))


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
    if (path / TREE_FILE).is_file():
        _check_tree(path)
        return None
    if not (path / ITEMS_FILE).is_file():
        _refuse(os.listdir(path))
    # Several trees in one directory: a checkpoint of the bridge, or a manager's step.
    names = _json_of(path / ITEMS_FILE, "item_handlers")
    if not names or any(
        name in ("", ".", "..") or os.path.basename(name) != name for name in names
    ):
        raise NotACheckpointError(
            f"a directory whose {ITEMS_FILE} names none, or what is not in it"
        )
    others = set(os.listdir(path)) - names.keys() - {ITEMS_FILE, COMMITTED}
    if others:
        _refuse(others)
    for child in (path / name for name in names):
        if child.is_symlink():
            raise NotACheckpointError(f"a directory in which {child.name} is a symbolic link")
        if (child / TREE_FILE).is_file():
            _check_tree(child)
        elif child.exists():
            # A directory with one JSON document.
            files = [file for file in _files(child) if file != COMMITTED]
            if len(files) != 1 or "/" in files[0]:
                _refuse([f"{child.name}/{file}" for file in files] or [child.name])
            _json_of(child / files[0])
    return None


def _check_tree(path: Path) -> None:
    """One orbax tree."""
    entries = _json_of(path / TREE_FILE, "tree_metadata").values()
    all_keys = [entry.get("key_metadata", ()) for entry in entries if isinstance(entry, Mapping)]
    arrays = {
        ".".join(str(key.get("key")) for key in keys if isinstance(key, Mapping))
        for keys in all_keys
    }
    others = [
        file
        for file in _files(path)
        if not _TREE.fullmatch(file)
        and not (file.partition("/")[0] in arrays and _ARRAY.fullmatch(file.partition("/")[2]))
    ]
    if others:
        _refuse(others)


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


def _files(root: Path) -> Iterator[str]:
    """Every file and link below a directory, by its path in it."""
    for folder, folders, files in os.walk(root):
        own = os.path.relpath(folder, root)
        prefix = "" if own == "." else own.replace(os.sep, "/") + "/"
        yield from (prefix + name for name in files)
        yield from (f"{prefix}{n}/" for n in folders if os.path.islink(os.path.join(folder, n)))


def _json_of(path: Path, *entry: str) -> Mapping[str, Any]:
    """The JSON in a file, or the mapping at an entry of it."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and entry:
        content = content.get(*entry)
    if not isinstance(content, dict):
        raise NotACheckpointError(f"a directory whose {path.name} is damaged, or none of orbax's")
    return content


def _refuse(others: Iterable[str]) -> NoReturn:
    names = sorted(others)
    if not names:
        raise NotACheckpointError("an empty directory")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise NotACheckpointError(
        f"a directory that is no checkpoint: it holds {', '.join(map(repr, names[:3]))}{more}"
    )
