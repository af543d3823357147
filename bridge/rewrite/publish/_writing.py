"""Writes new files: all of them or none, and never over somebody's work."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping

from bridge.rewrite._failures import RewriteError
from bridge.rewrite.syntax._source import Source

_MARK = re.compile(r"^# Written by bridge\.rewrite, digest ([0-9a-f]{12})\n", re.MULTILINE)


def marked(text: str) -> str:
    """A file's text with the line by which the rewriter knows its own."""
    return f"# Written by bridge.rewrite, digest {_digest(text)}\n{text}"


def write_files(files: Mapping[str, str], *, overwrite: bool) -> tuple[str, ...]:
    """Writes files that are new or that the rewriter wrote before.

    With `overwrite`, others are replaced too. Returns the paths of those that changed. Raises
    RewriteError if a file is somebody else's, or was changed; nothing is written then.
    """
    changed = changed_files(files)
    if not overwrite:
        _check(changed)
    _replace(changed)
    return tuple(map(str, changed))


def write_in_place(texts: Mapping[str, str], files: Mapping[str, str]) -> tuple[str, ...]:
    """Writes texts over the files that they come from, and files of the rewriter's own.

    Returns the paths of those that changed. Raises RewriteError if one of `files`, which are as for
    `write_files`, is somebody else's; nothing is written then.
    """
    own = changed_files(files)
    _check(own)
    wanted = {pathlib.Path(path): text for path, text in texts.items()}
    changed = {p: text for p, text in wanted.items() if is_changed(p, text)} | own
    _replace(changed)
    return tuple(map(str, changed))


def check_sources(sources: Iterable[Source]) -> None:
    """Raises an error for files that were changed since they were read.

    Raises RewriteError if there are some, or if one is gone.
    """
    changed = [shown_path(each.file) for each in sources if bytes_of(each.file) != each.data]
    if changed:
        raise RewriteError(
            "the files were changed since they were read", changed, "Run the rewriter again."
        )


def bytes_of(path: str) -> bytes | None:
    """What a file holds, None if it cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return None


def is_changed(path: pathlib.Path | str, text: str) -> bool:
    """Whether a file has another text."""
    return pathlib.Path(path).read_bytes() != text.encode()


def _check(changed: Mapping[pathlib.Path, str]) -> None:
    """Looks for files that are not the rewriter's.

    Raises RewriteError if there are some.
    """
    there = {p: text for p, text in changed.items() if p.exists()}
    foreign = [str(p) for p, text in there.items() if not is_own(p)]
    lost = [
        f"{p}: {', '.join(names)}"
        for p, text in there.items()
        if is_own(p) and (names := _lost(p, text))
    ]
    if lost:
        raise RewriteError(
            "these files hold classes that the new ones lack",
            lost,
            "Rewrite all entry points together (also=), or pass overwrite=True.",
        )
    if foreign:
        raise RewriteError(
            "these files were not written by bridge.rewrite, or were changed since",
            foreign,
            "Move them away, or pass overwrite=True.",
        )


def _replace(changed: Mapping[pathlib.Path, str]) -> None:
    """Puts texts in the place of files: all of them or none."""
    temporary: dict[pathlib.Path, str] = {}
    before: dict[pathlib.Path, bytes | None] = {}
    umask = os.umask(0)
    os.umask(umask)
    try:
        for path, text in changed.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            temporary[path] = name
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
            # `mkstemp` lets nobody else read it.
            os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~umask)
        try:
            for path, name in list(temporary.items()):
                before[path] = path.read_bytes() if path.exists() else None
                os.replace(name, path)
                del temporary[path]
        except BaseException:
            # Also where the user interrupts it.
            for path, content in before.items():
                path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
            raise
    finally:
        for name in temporary.values():
            pathlib.Path(name).unlink(missing_ok=True)


def changed_files(files: Mapping[str, str]) -> dict[pathlib.Path, str]:
    """The files that are not there or have another text, with what they will have."""
    wanted = {pathlib.Path(path): marked(text) for path, text in files.items()}
    return {p: t for p, t in wanted.items() if not p.exists() or p.read_bytes() != t.encode()}


def is_own(path: pathlib.Path) -> bool:
    """Whether the rewriter wrote a file, and nobody changed it since."""
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


def shown_path(path: str) -> str:
    """A path as it is shown: below the working directory without that."""
    try:
        return pathlib.Path(path).relative_to(pathlib.Path.cwd()).as_posix()
    except ValueError:
        return path
