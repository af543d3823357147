"""Keeps a save from replacing what is not a checkpoint, and what is stood in or read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge._errors import CheckpointError

from . import _single_files
from ._files import COMMITTED, ITEMS_FILE, TREE_FILE, absolute, latest_step

# Every file that orbax writes for a tree, by its path in the tree's directory. A database has
# arrays in files with hexadecimal names; without it each array has a directory with an index.
_TREE = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|checkpoint"
    r"|array_metadatas/process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]+)"
)
_ARRAY_INDEXES = ("/.zarray", "/zarr.json")
_ARRAY = re.compile(r"\.zarray|\.zattrs|zarr\.json|\d+(\.\d+)*|c(/\d+)*")


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
    check_content(path, path)
    form = _single_files.format_of(path) if path.is_file() else None
    if form != file_format:
        raise _refused(
            f"a checkpoint that is a {form} file" if form else "a checkpoint directory", path
        )


def _is_at_or_above(path: Path, other: Path) -> bool:
    """Whether a path is another one or holds it, by whatever names both go."""
    below = other.resolve()
    return path.exists() and any(p.exists() and path.samefile(p) for p in (below, *below.parents))


def check_content(where: Path, path: Path) -> None:
    """Raises CheckpointError if there is anything but a checkpoint.

    A directory is one if it has the index that orbax writes, and every file in it is one that this
    index calls for. A file is one if it is one of safetensors that the bridge wrote: data sets are
    such files too. The error names `path` instead of `where`.
    """
    if found := _foreign(where):
        raise _refused(found, path)


def _refused(found: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"there is {found} at",
        path,
        "Only a checkpoint and nothing else is replaced. Save to another path, or remove it first.",
    )


def _foreign(path: Path) -> str:
    """What there is that is not a checkpoint, or not part of one; empty if there is nothing."""
    if path.is_symlink():
        return f"a symbolic link to {os.readlink(path)}"
    if path.is_file():
        form = _single_files.format_of(path)
        if form is None:
            return "a file that is not a checkpoint"
        is_own = _single_files.is_own(path, form)
        return "" if is_own else f"a {form} file that the bridge did not write"
    if not path.is_dir():
        return "neither a directory nor a file"
    if (path / TREE_FILE).is_file():
        others = _files(path) - _written(path)
    else:
        # Several items in one directory: a checkpoint of the bridge, or a manager's step.
        items = _json_of(path / ITEMS_FILE).get("item_handlers") or ()
        others = _files(path) - {path / ITEMS_FILE, path / COMMITTED}
        others = others.difference(*(_written(path / item) for item in items))
        others = others if items else set(path.iterdir())
        if not others and not items:
            return "an empty directory"
    names = [other.relative_to(path).as_posix() for other in sorted(others)]
    more = f" and {len(names) - 3} more" if names[3:] else ""
    shown = ", ".join(map(repr, names[:3])) + more
    return f"a directory that is not a checkpoint: it holds {shown}" if names else ""


def _written(root: Path) -> set[Path]:
    """The files in a directory that orbax wrote for one item, a tree or a JSON document."""
    files = _files(root)
    if root / TREE_FILE not in files:
        documents = [file for file in files if file.name != COMMITTED]
        is_one = [file.parent for file in documents] == [root] and _json_of(documents[0])
        return files if is_one else set()
    if not _json_of(root / TREE_FILE).get("tree_metadata"):
        return set()
    names = {file.relative_to(root).as_posix(): file for file in files}
    # Without a database each array has a directory of its own.
    arrays = {name.rpartition("/")[0] for name in names if name.endswith(_ARRAY_INDEXES)}
    return {
        file
        for name, file in names.items()
        if _TREE.fullmatch(name)
        or (name.partition("/")[0] in arrays and _ARRAY.fullmatch(name.partition("/")[2]))
    }


def _files(root: Path) -> set[Path]:
    """Every file and link below a directory."""
    return {path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


def _json_of(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; an empty one if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
