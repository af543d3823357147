"""The new text of a file of the program: the old one with its changes, and imports of new files."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator, Mapping

from flax.training.train_state import TrainState

from bridge.rewrite.emit._files import SUFFIX, NewFile, alias_text, import_line
from bridge.rewrite.plan._plans import Program as Classes
from bridge.rewrite.publish._in_place import in_place_text
from bridge.rewrite.syntax._source import Edit, bound_in, is_import, span_of

from ._changes import Change, edits_of
from ._program import File
from ._states import plain_state


def text_of(
    classes: Classes, file: File, whole: Collection[str], names: Mapping[str, Collection[str]]
) -> str:
    """The new text.

    `classes` has what the rewriter knows of the classes. The modules `whole` have all their names
    in a new file. `names` has the names that other new files have, by the names of the old modules.
    """
    new = NewFile(classes, file.source, file.module.__name__)
    changes = [*file.changes, *_annotations(file)]
    text = in_place_text(new, edits_of(file.source, changes))
    data, tree = text.encode(), ast.parse(text)
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits: list[Edit] = []
    for node in tree.body:
        lines = _redirected(file, node, whole, names)
        if lines is not None:
            span = span_of(node)
            start = starts[span.line - 1] + span.column
            edits.append(Edit(start, starts[span.end_line - 1] + span.end_column, "\n".join(lines)))
    if file.state:
        last = [node for node in tree.body if is_import(node)][-1]
        place = starts[span_of(last).end_line]
        edits.append(Edit(place, place, f"\n\n{plain_state(file.state)}\n"))
        for node in tree.body:
            span = span_of(node)
            if not isinstance(node, ast.ClassDef) and bound_in(node) == {file.state}:
                # Flax's class by this name.
                edits.append(Edit(starts[span.line - 1], starts[span.end_line], ""))
    if "functools." in text and not any("functools" in bound_in(node) for node in tree.body):
        first = next(n for n in tree.body if is_import(n) and "__future__" not in ast.unparse(n))
        place = starts[first.lineno - 1]
        edits.append(Edit(place, place, "import functools\n"))
    for edit in sorted(edits, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


def _annotations(file: File) -> Iterator[Change]:
    """Annotations of plain states, which have a class of this file now."""
    for node in ast.walk(file.source.tree) if file.state else ():
        given = [getattr(node, name, None) for name in ("annotation", "returns")]
        for each in (each for top in given if isinstance(top, ast.AST) for each in ast.walk(top)):
            if isinstance(each, ast.Attribute) and file.value_of(each) is TrainState:
                yield Change(each, (file.state,))


def modules_in(file: File) -> set[str]:
    """The names of the modules that a file imports as modules."""
    found = set()
    for node in file.source.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{_absolute(file, node)}.{alias.name}" for alias in node.names}
    return found


def _absolute(file: File, node: ast.ImportFrom) -> str:
    where = f"{'.' * node.level}{node.module or ''}"
    package = getattr(file.module, "__package__", "") or ""
    return importlib.util.resolve_name(where, package) if node.level else where


def _redirected(
    file: File, node: ast.stmt, whole: Collection[str], names: Mapping[str, Collection[str]]
) -> list[str] | None:
    """An import from where the names now are, None if they are where they were."""
    if isinstance(node, ast.Import):
        lines = []
        for alias in node.names:
            is_new = alias.name in whole and (alias.asname or "." not in alias.name)
            own = alias.asname or alias.name
            text = f"{alias.name}{SUFFIX} as {own}" if is_new else alias_text(alias)
            lines.append(f"import {text}")
        return lines if any(SUFFIX in line for line in lines) else None
    if not isinstance(node, ast.ImportFrom):
        return None
    where = f"{'.' * node.level}{node.module or ''}"
    absolute = _absolute(file, node)
    places: dict[str, list[str]] = {}
    for alias in node.names:
        own = alias.asname or alias.name
        if absolute in whole or alias.name in names.get(absolute, ()):
            places.setdefault(f"{where}{SUFFIX}", []).append(alias_text(alias))
        elif f"{absolute}.{alias.name}" in whole:
            places.setdefault(where, []).append(f"{alias.name}{SUFFIX} as {own}")
        else:
            places.setdefault(where, []).append(alias_text(alias))
    lines = [import_line(place, given) for place, given in places.items()]
    return lines if any(SUFFIX in line for line in lines) else None
