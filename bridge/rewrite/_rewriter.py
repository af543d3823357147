"""The whole rewriting: trace, write, prove, and again without what failed."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _runs
from ._blame import Blame
from ._class_text import ClassText
from ._collect import collect, inside_of
from ._entries import (
    Entry,
    Varied,
    branches,
    combined,
    difference,
    is_flag,
    shaped,
    training_kwargs,
    variations,
)
from ._files import SUFFIX, NewFile, modules_of
from ._function_plans import FunctionPlan, called_function
from ._function_text import FunctionText
from ._in_place import InPlace
from ._plans import ClassPlan, LeftLinenError, Program, SizeArgument
from ._proof import prove
from ._proof_in_place import fault_in_place
from ._proven import Proof
from ._references import References
from ._source import Source, source_of
from ._trace import Watch

_MOST_ROUNDS = 40
_SECONDS_FOR_VARIATIONS = 20.0
_MOST_VARIATIONS = 24


class Rewriter:
    """Rewrites a program.

    Args:
        entries: what is run, the first one the main one.
        keep_names: whether automatic names stay Linen's.
        only: names of the classes that may be rewritten, None for all.
        skip: names of classes that stay Linen.
        told: is given a line about what goes on.
        gradients: whether gradients are compared.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        keep_names: bool,
        only: Sequence[str] | None,
        skip: Sequence[str],
        told: Callable[[str], None],
        gradients: bool = True,
    ) -> None:
        self.entries, self.keep_names = list(entries), keep_names
        self.only, self.skip, self.told = only, skip, told
        self.gradients = gradients
        self.left: dict[type, tuple[str, int | None]] = {}
        self.notes: list[str] = []
        self.files: list[NewFile] = []
        self.texts: dict[str, tuple[str, str]] = {}
        self.proof: Proof | None = None
        self.varied: list[Varied] = []
        self.root: type = type(self.entries[0].make())
        self._inside = inside_of(self.root)

    def trace(self) -> None:
        """Runs every entry, and the model with other sizes."""
        watch = Watch(self._inside, _watched_lines)
        for number, entry in enumerate(self.entries):
            self.told(f"tracing entry {number + 1}")
            _runs.run_entry(watch, shaped(entry))
        self._vary(watch)
        self.program: Program = self._collected()
        self._is_fresh = True

    def _vary(self, watch: Watch) -> None:
        self.watch, self.varied = watch, []
        started = time.process_time()
        for entry in self.entries:
            module = entry.make()
            training = training_kwargs(entry)
            if training is not None and self._traced(entry, None, entry.inputs, training) is None:
                self.notes.append("the model was not traced in training: it raised")
            together = combined(module, entry.inputs)
            every = variations
            if together is not None:
                run = self._traced(entry, *together, entry.kwargs)
                if run is not None:
                    every = branches
                    self._keep(run, entry, *together, "other sizes")
            for number, (changed, inputs) in enumerate(every(module, entry.inputs)):
                if time.process_time() - started > _SECONDS_FOR_VARIATIONS or (
                    number >= _MOST_VARIATIONS
                ):
                    self.notes.append("not all sizes were varied: it would have taken too long")
                    return
                self.told(f"tracing with other sizes, {number + 1}")
                run = self._traced(entry, changed, inputs, entry.kwargs)
                if run is not None:
                    what = ", ".join(difference(module, changed)) or "other inputs"
                    self._keep(run, entry, changed, inputs, what)

    def _traced(self, entry: Entry, changed: Any, inputs: Any, kwargs: Any) -> int | None:
        """The number of a run, None if it raised."""
        try:
            return _runs.run(self.watch, changed or entry.make(), inputs, kwargs, entry.method)
        except Exception:
            return None

    def _keep(self, run: int, entry: Entry, changed: Any, inputs: Any, what: str) -> None:
        own = dataclasses.replace(entry, make=lambda: changed, inputs=inputs)
        self.varied.append(Varied(run, own, what, is_flag(what)))

    def _collected(self) -> Program:
        program = collect(self.watch.records, self._inside)
        program.keep_names = self.keep_names
        program.entries = len(self.entries)
        return program

    def run(self) -> None:
        """Rewrites until the proof holds."""
        for _ in range(_MOST_ROUNDS):
            self.write()
            self.told("proving")
            culprit = self._proven()
            if culprit is None:
                return
            cls, reason = culprit
            if cls in self.left:
                cls = self._blame().outermost()
                if cls is None:
                    return
            self.left[cls] = (reason, None)

    def write(self) -> None:
        """Writes the new texts, without a proof."""
        if not self._is_fresh:
            self.program = self._collected()
        self._is_fresh = False
        self._leave()
        self._write()

    def _leave(self) -> None:
        for cls, plan in self.program.plans.items():
            if cls in self.left:
                plan.leave(*self.left[cls])
            if isinstance(plan, FunctionPlan):
                continue
            if self.only is not None and plan.name not in self.only:
                plan.leave("it is not among those that were asked for")
            if plan.name in self.skip:
                plan.leave("it was to be left out")
        for plan in self.program.plans.values():
            left = plan.left_around(self.program) if isinstance(plan, FunctionPlan) else None
            if left is not None:
                plan.leave(f"it is inside of {left}, which stays Linen")
            for slot in plan.slots.values():
                made = called_function(self.program, slot)
                if made is not None and (made.reason or made.source is not plan.source):
                    reason = made.reason or "it is in another file"
                    plan.leave(f"a function makes a layer of it: {reason}", slot.node.lineno)
            for base in plan.bases:
                if base.reason is not None:
                    plan.leave(f"it derives from {base.name}, which stays Linen")
            if not any(i.cls is plan.cls for i in self.watch.records.instances.values()) and not (
                any(plan in other.bases for other in self.program.plans.values())
            ):
                plan.leave("no call of it was seen")

    def _write(self) -> None:
        program = self.program
        modules = modules_of(program)
        references = {
            file: References(program, source, vars(sys.modules[modules[file]]))
            for file, source in program.sources.items()
            if file in modules
        }
        for plan in program.plans.values():
            if plan.reason is not None:
                continue
            try:
                for base in plan.bases:
                    _inherit(plan, base)
                names = references[plan.source.file]
                if isinstance(plan, FunctionPlan):
                    plan.text = FunctionText(program, plan, names).text()
                else:
                    plan.text = ClassText(program, plan, names).text()
                compile(plan.text, plan.name, "exec")
            except LeftLinenError as error:
                left = error.reason, error.line
            except SyntaxError as error:
                left = f"its new text does not parse: {error.msg}", None
            except Exception as error:
                left = f"the rewriter failed: {type(error).__name__}: {error}", None
            else:
                continue
            self.left[plan.cls] = left
            self.program = self._collected()
            self._leave()
            self._write()
            return
        self._assemble(modules)

    def _assemble(self, modules: dict[str, str]) -> None:
        program = self.program
        files = [
            file
            for file in modules
            if any(p.reason is None and p.source.file == file for p in program.plans.values())
        ]
        program.new_modules = {modules[file]: f"{modules[file]}{SUFFIX}" for file in files}
        self.files = [NewFile(program, program.sources[file], modules[file]) for file in files]
        self.texts = {f.name: (str(f.path), f.text()) for f in self.files}

    def _proven(self) -> tuple[type, str] | None:
        """What failed and why, None if nothing did."""
        root = self.root
        plan = self.program.plan_of(root)
        if plan is None or plan.reason is not None:
            self.proof = None
            return None
        self.proof = None
        blame = self._blame()
        hidden = blame.hidden(len(self.entries))
        if hidden is not None:
            return hidden, "it is used only inside of what stays Linen"
        try:
            proof = prove(
                self.program,
                self.entries,
                self.files,
                self.texts,
                self.varied,
                gradients=self.gradients,
            )
        except LeftLinenError as error:
            return root, error.reason
        except Exception as error:
            return blame.of_error(error)
        self.proof = proof
        return None if proof.ok else blame.of_difference(proof)

    def in_place(self) -> InPlace:
        """The old files with NNX classes in them."""

        def fault(texts: Mapping[str, tuple[str, str]]) -> str | None:
            return fault_in_place(self.program, self.entries, self.files, texts)

        return InPlace(self.files, fault, is_proven=self.proof is not None and self.proof.ok)

    def _blame(self) -> Blame:
        return Blame(self.program, self.root, self.files, self.texts, self.left)


def _inherit(plan: ClassPlan, base: ClassPlan) -> None:
    """The sizes that the parent's constructor needs, for the instances of the child."""
    for name, size in base.sizes.items():
        plan.sizes.setdefault(name, SizeArgument(name, dict(size.values)))


_WATCHED: dict[str, frozenset[int]] = {}


def _watched_lines(file: str) -> frozenset[int]:
    """The lines of conditions."""
    if file not in _WATCHED:
        try:
            source: Source = source_of(file, pathlib.Path(file).stat().st_mtime)
            _WATCHED[file] = frozenset(
                node.test.lineno
                for node in ast.walk(source.tree)
                if isinstance(node, ast.If | ast.IfExp)
                and any(
                    (isinstance(n, ast.Attribute) and n.attr in ("shape", "ndim"))
                    or isinstance(n, ast.Name)
                    for n in ast.walk(node.test)
                )
            )
        except (SyntaxError, UnicodeDecodeError, OSError):
            _WATCHED[file] = frozenset()
    return _WATCHED[file]
