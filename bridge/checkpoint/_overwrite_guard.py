"""Keeps a save from replacing what is not a checkpoint, and what is stood in or read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge._errors import CheckpointError

from . import _single_files
from ._files import COMMITTED, ITEMS_FILE, TREE_FILE
from ._paths import absolute, latest_step

# Every file that orbax writes for a tree, by its path in the tree's directory. A database has
# arrays in files with hexadecimal names; without it each array has a directory with an index.
_TREE = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|checkpoint"
    r"|array_metadatas/process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]+)"
)
_ARRAY_INDEXES = ("/.zarray", "/zarr.json")
_ARRAY = re.compile(r"\.zarray|\.zattrs|zarr\.json|\d+(\.\d+)*|c(/\d+)*")


class _OtherThingsError(Exception):
    """What is at a path is not a checkpoint, or holds other things too; the text says what."""


def check(
    path: Path, file_format: str | None, sources: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Raises CheckpointError if what is at a path is not a checkpoint that may be replaced.

    Something must be at `path`. `file_format` is the format of the file that is to take its place,
    None for a directory. `sources` are read meanwhile.
    """
    if not path.is_symlink():
        if _is_at_or_above(path, Path.cwd()):
            raise _refused("the current directory, or one above it,", path)
        for source in (Path(os.fspath(latest_step(absolute(p)))) for p in sources):
            if _is_at_or_above(path, source) or _is_at_or_above(source, path):
                what = f"the checkpoint that is read, or what holds it or lies in it ({source}),"
                raise _refused(what, path)
    form = check_content(path, path)
    if form != file_format:
        raise _refused(
            f"a checkpoint that is a {form} file" if form else "a checkpoint directory", path
        )


def _is_at_or_above(path: Path, other: Path) -> bool:
    """Whether a path is another one or holds it, by whatever names both go."""
    below = other.resolve()
    return path.exists() and any(p.exists() and path.samefile(p) for p in (below, *below.parents))


def check_content(where: Path, path: Path) -> str | None:
    """Raises CheckpointError if there is anything but a checkpoint.

    A directory is one if a file in it has the form of the index that orbax writes, and every file
    in it is one that this index calls for. A file is one if it is one of safetensors that the
    bridge wrote: data sets are such files too. The error names `path` instead of `where`. Returns
    the format of a file, None for a directory.
    """
    try:
        return _form_of(where)
    except _OtherThingsError as error:
        raise _refused(str(error), path) from None


def _refused(found: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"there is {found} at",
        path,
        "Only a checkpoint and nothing else is replaced. Save to another path, or remove it first.",
    )


def _form_of(path: Path) -> str | None:
    if path.is_symlink():
        raise _OtherThingsError(f"a symbolic link to {os.readlink(path)}")
    if path.is_file():
        return _form_of_file(path)
    if not path.is_dir():
        raise _OtherThingsError("neither a directory nor a file")
    files = _files(path)
    if TREE_FILE in files:
        _check_tree(path, files)
        return None
    if ITEMS_FILE not in files:
        raise _holds(os.listdir(path))
    # Several trees in one directory: a checkpoint of the bridge, or a manager's step.
    names = _json_of(path / ITEMS_FILE, "item_handlers")
    by_item: dict[str, list[str]] = {}
    for file in files:
        item, _, rest = file.partition("/")
        by_item.setdefault(item, []).append(rest)
    others = by_item.keys() - names.keys() - {ITEMS_FILE, COMMITTED}
    if others or not names:
        raise _holds(others or os.listdir(path))
    for item in by_item.keys() & names.keys():
        own = by_item[item]
        if TREE_FILE in own:
            _check_tree(path / item, own)
            continue
        # A directory with one JSON document.
        documents = [file for file in own if file != COMMITTED]
        if len(documents) != 1 or "/" in documents[0]:
            raise _holds(f"{item}/{file}" for file in documents)
        _json_of(path / item / documents[0])
    return None


def _check_tree(path: Path, files: Collection[str]) -> None:
    """One orbax tree."""
    _json_of(path / TREE_FILE, "tree_metadata")
    # Without a database each array has a directory of its own.
    arrays = {file.rpartition("/")[0] for file in files if file.endswith(_ARRAY_INDEXES)}
    others = [
        file
        for file in files
        if not _TREE.fullmatch(file)
        and not (file.partition("/")[0] in arrays and _ARRAY.fullmatch(file.partition("/")[2]))
    ]
    if others:
        raise _holds(others)


def _form_of_file(path: Path) -> str:
    try:
        form = _single_files.format_of(path)
        is_own = form is not None and _single_files.is_own(path, form)
    except OSError:
        raise
    except Exception as error:
        raise _OtherThingsError("a file that is not a checkpoint") from error
    if form is None:
        raise _OtherThingsError("a file that is not a checkpoint")
    if not is_own:
        raise _OtherThingsError(f"a {form} file that the bridge did not write")
    return form


def _files(root: Path) -> list[str]:
    """Every file and link below a directory, by its path in it."""
    paths = [path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()]
    return [path.relative_to(root).as_posix() for path in paths]


def _json_of(path: Path, *entry: str) -> Mapping[str, Any]:
    """The JSON in a file, or the mapping at an entry of it."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and entry:
        content = content.get(*entry)
    if not isinstance(content, dict):
        raise _OtherThingsError(f"a directory with a {path.name} that is damaged, or not orbax's")
    return content


def _holds(others: Iterable[str]) -> _OtherThingsError:
    names = sorted(others)
    if not names:
        return _OtherThingsError("an empty directory")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return _OtherThingsError(
        f"a directory that is not a checkpoint: it holds {', '.join(map(repr, names[:3]))}{more}"
    )
