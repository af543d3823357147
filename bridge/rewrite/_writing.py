"""Writes new files: all of them or none, and never over somebody's work."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping

from ._failures import RewriteError

_MARK = re.compile(r"^# Written by bridge\.rewrite, digest ([0-9a-f]{12})\n", re.MULTILINE)


def marked(text: str) -> str:
    """A file's text with the line by which the rewriter knows its own."""
    return f"# Written by bridge.rewrite, digest {_digest(text)}\n{text}"


def write_files(files: Mapping[str, str], *, overwrite: bool) -> tuple[str, ...]:
    """Writes files that are new or that the rewriter wrote before.

    Args:
        files: texts by path.
        overwrite: whether others are replaced too.

    Returns:
        The paths of those that changed.

    Raises:
        RewriteError: a file is somebody else's, or was changed; nothing is written.
    """
    changed = changed_files(files)
    there = {p: text for p, text in changed.items() if p.exists() and not overwrite}
    foreign = [str(p) for p, text in there.items() if not _is_own(p)]
    lost = [
        f"{p}: {', '.join(names)}"
        for p, text in there.items()
        if _is_own(p) and (names := _lost(p, text))
    ]
    if lost:
        raise RewriteError(
            "these files hold classes that the new ones lack",
            lost,
            "Rewrite all entry points together (--model), or pass overwrite=True (--overwrite).",
        )
    if foreign:
        raise RewriteError(
            "these files were not written by bridge.rewrite, or were changed since",
            foreign,
            "Move them away, or pass overwrite=True (--overwrite).",
        )
    temporary: dict[pathlib.Path, str] = {}
    try:
        for path, text in changed.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            temporary[path] = name
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
            # `mkstemp` lets nobody else read it.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
        for path, name in list(temporary.items()):
            os.replace(name, path)
            del temporary[path]
    finally:
        for name in temporary.values():
            pathlib.Path(name).unlink(missing_ok=True)
    return tuple(map(str, changed))


def changed_files(files: Mapping[str, str]) -> dict[pathlib.Path, str]:
    """The files that are not there or have another text, with what they will have."""
    wanted = {pathlib.Path(path): marked(text) for path, text in files.items()}
    return {p: t for p, t in wanted.items() if not p.exists() or p.read_bytes() != t.encode()}


def _is_own(path: pathlib.Path) -> bool:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    found = _MARK.match(text)
    return found is not None and found.group(1) == _digest(text[found.end() :])


def _lost(path: pathlib.Path, text: str) -> list[str]:
    """The classes that a file has and its new text has not."""
    if path.suffix != ".py":
        return []
    before, after = (
        {node.name for node in ast.parse(each).body if isinstance(node, ast.ClassDef)}
        for each in (path.read_text(encoding="utf-8"), text)
    )
    return sorted(before - after)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
