"""The old files with NNX classes in them: allowed where nothing is left that expects Linen's."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax import linen as nn

from bridge.rewrite._failures import RewriteError
from bridge.rewrite.emit._files import NewFile, names_of
from bridge.rewrite.plan._plans import ClassPlan
from bridge.rewrite.plan._refusals import refused
from bridge.rewrite.syntax._source import Edit, Source, bound_in, is_import

from ._result import Training
from ._uses import Uses
from ._writing import bytes_of, shown_path


class Obstacle(NamedTuple):
    """What stands in the way.

    `may_stay` says whether the user may declare it taken care of.
    """

    file: str
    line: int
    text: str
    may_stay: bool

    def __str__(self) -> str:
        return f"{shown_path(self.file)}:{self.line}: {self.text}"


class InPlace:
    """What `write(in_place=True)` writes.

    `proven` says what fails in the new texts, given by module: path and text. What the functions in
    `training` use, which are rewritten too, is no obstacle. `is_proven` says whether the program
    was proven.
    """

    def __init__(
        self,
        files: Sequence[NewFile],
        proven: Callable[[Mapping[str, tuple[str, str]]], str | None],
        training: Training,
        *,
        is_proven: bool,
    ) -> None:
        self.files, self.is_proven, self._proven = files, is_proven, proven
        self.training = training
        # A text is shown before it is written, and its proof takes as long as the first.
        self._faults: dict[Any, str | None] = {}

    def texts(self, by_hand: Iterable[str]) -> dict[str, str]:
        """The new texts by path.

        What is in the files `by_hand`, which the user changes, is no obstacle. Raises RewriteError
        with all obstacles if there are any.
        """
        texts = {each.source.file: in_place_text(each) for each in self.files}
        if texts and all(bytes_of(path) == text.encode() for path, text in texts.items()):
            return texts
        accepted = {pathlib.Path(each).resolve() for each in by_hand}
        found = [
            each
            for each in sorted(self._obstacles(), key=lambda o: (o.may_stay, o.file, o.line))
            if not (each.may_stay and pathlib.Path(each.file).resolve() in accepted)
        ]
        if found:
            files = sorted({shown_path(each.file) for each in found if each.may_stay})
            hint = (
                f" Where you change the places by hand, name the files: by_hand={files!r}."
                if files
                else ""
            )
            raise RewriteError(
                "the files cannot be rewritten in place",
                map(str, found),
                f"Write new files beside them, or remove what is in the way.{hint}",
            )
        modules = {f.module: (f.source.file, texts[f.source.file]) for f in self.files}
        key = tuple(modules.items())
        if key not in self._faults:
            self._faults[key] = self._proven(modules)
        wrong = self._faults[key]
        if wrong is not None:
            raise RewriteError(
                "the files cannot be rewritten in place",
                [wrong],
                "Write new files beside them, and move what they have over by hand.",
            )
        return texts

    def _obstacles(self) -> Iterator[Obstacle]:
        if not self.files or not self.is_proven:
            file = self.files[0].source.file if self.files else "?"
            yield Obstacle(file, 1, "the program as a whole is not proven", False)
        if not self.files:
            return
        for each in self.files:
            yield from self._in_file(each)
        rewritten = {
            f.module: {plan.name for plan in f.plans if plan.refusal is None} for f in self.files
        }
        modules = {f.source.file: f.module for f in self.files}
        for use in Uses(modules, rewritten).found():
            obstacle = Obstacle(*use, True)
            if not (self.training.is_proven and self.training.is_about(str(obstacle))):
                yield obstacle
        for each in self.training.left if self.training.is_proven else ():
            yield Obstacle(each.file, each.line, f"{each.name}: {each.refusal}", True)

    def _in_file(self, file: NewFile) -> Iterator[Obstacle]:
        path = file.source.file
        if bytes_of(path) != file.source.data:
            yield Obstacle(path, 1, "the file was changed since it was read", False)
        plans = {plan.node: plan for plan in file.plans}
        for node in file.source.tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            cls, plan = file.namespace.get(node.name), plans.get(node)
            refusal = plan.refusal if plan is not None else None
            if plan is not None and refusal is None:
                yield from self._notes(file, plan)
            elif refusal is not None:
                text = f"{node.name} stays Linen: {refusal}"
                yield Obstacle(path, refusal.line or node.lineno, text, False)
            elif isinstance(cls, type) and issubclass(cls, nn.Module):
                text = f"{node.name} stays Linen: {refused('not-called')}"
                yield Obstacle(path, node.lineno, text, False)

    def _notes(self, file: NewFile, plan: ClassPlan) -> Iterator[Obstacle]:
        for line, text in file.program.notes_of(plan):
            yield Obstacle(file.source.file, line, f"{plan.name} needs review: {text}", True)


def in_place_text(file: NewFile, more: Iterable[Edit] = ()) -> str:
    """The old text with the new classes, and with what they need and no longer need imported.

    `more` has other edits of the old file.
    """
    source = file.source
    # A class that stays Linen is in a file that stays, and has its name here.
    pieces = {node: re.sub(r"\b_linen\.", "", text) for node, text in file.pieces().items()}
    edits = [Edit(source.start(node), source.end(node), text) for node, text in pieces.items()]
    edits += more
    old = source.text
    text = source.stretch(0, len(source.data), edits)
    used, before = {*names_of(text), *_exported(source.tree)}, set(names_of(old))
    for node in reversed(source.tree.body):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        gone = {name for name in bound_in(node) & before if name not in used}
        if gone and pathlib.Path(source.file).name != "__init__.py":
            edits.append(_without(file, node, gone))
    bound = set().union(*(bound_in(node) for node in source.tree.body if is_import(node)))
    added = ["from flax import nnx"] if "nnx" in used - bound else []
    added += [f"import {name}" for name in ("bridge", "registry") if name in used - bound]
    if added:
        edits.append(behind_flax(source, added))
    return source.stretch(0, len(source.data), _merged(edits))


def _without(file: NewFile, node: ast.Import | ast.ImportFrom, gone: set[str]) -> Edit:
    """An import without names that nothing needs."""
    source = file.source
    kept = [a for a in node.names if (a.asname or a.name).split(".")[0] not in gone]
    if not kept:
        return source.lines_of(node)
    return source.edit(node, ast.unparse(_with_names(node, kept)))


def _with_names(node: ast.Import | ast.ImportFrom, kept: list[ast.alias]) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import(kept)
    return ast.ImportFrom(node.module, kept, node.level)


def behind_flax(source: Source, added: Iterable[str]) -> Edit:
    """New imports behind those of Flax, or behind the last one."""
    nodes = [node for node in source.tree.body if is_import(node)]
    flax = [n for n in nodes if ast.unparse(n).startswith(("from flax", "import flax"))]
    absolute = [n for n in nodes if not getattr(n, "level", 0)]
    last = (flax or absolute or nodes)[-1]
    place = source.offset((last.end_lineno or last.lineno) + 1, 0)
    return Edit(place, place, "".join(f"{line}\n" for line in added))


def _merged(edits: list[Edit]) -> list[Edit]:
    """Edits; those that begin where another one ends become one."""
    found: list[Edit] = []
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if found and found[-1].end == edit.start:
            found[-1] = Edit(found[-1].start, edit.end, found[-1].text + edit.text)
        else:
            found.append(edit)
    return found


def _exported(tree: ast.Module) -> set[str]:
    """The names in `__all__`."""
    return {
        each.value
        for node in tree.body
        if isinstance(node, ast.Assign) and bound_in(node) == {"__all__"}
        for each in ast.walk(node.value)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
