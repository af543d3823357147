"""The whole rewriting: trace, write, prove, and again without what failed."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

from ._failures import RewriteError, said
from .emit._class_text import ClassText
from .emit._files import SUFFIX, NewFile, modules_of
from .emit._function_text import FunctionText
from .observe._entries import Entry
from .observe._runs import Runs, run_entry
from .observe._trace import Watch
from .plan._collect import class_of_program, collect, inside_of
from .plan._function_plans import FunctionPlan, called_function
from .plan._plans import ClassPlan, Program, SizeArgument
from .plan._references import References
from .plan._refusals import NotRewritableError, Refusal, refused
from .prove._blame import Blame
from .prove._field_variation import FieldVariation
from .prove._further_runs import run_further
from .prove._parts import parts_of
from .prove._proof import fault_in_place, prove
from .prove._proven import EntryError, Proof
from .publish._as_linen import AsLinen
from .publish._in_place import InPlace
from .publish._result import Training
from .syntax._source import watched_lines

_MOST_ROUNDS = 40


class Rewriter:
    """Rewrites a program.

    The first of `entries` is the main one. With `keep_names`, automatic names stay Linen's. Only
    classes named in `only` may be rewritten, None for all, and those in `skip` stay Linen.
    `on_progress` is called with a line of text at each stage. With `varies`, each class is proven
    for other values of its fields too.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        keep_names: bool,
        only: Sequence[str] | None,
        skip: Sequence[str],
        on_progress: Callable[[str], None],
        gradients: bool = True,
        varies: bool = True,
    ) -> None:
        self.entries, self.keep_names = list(entries), keep_names
        self.only, self.skip, self.on_progress = only, skip, on_progress
        self.gradients, self.varies = gradients, varies
        self.limits: dict[type, list[str]] = {}
        self._variation: FieldVariation | None = None
        self.left: dict[type, Refusal] = {}
        self.notes: list[str] = []
        self.files: list[NewFile] = []
        self.texts: dict[str, tuple[str, str]] = {}
        self.proof: Proof | None = None
        roots = [entry.make() for entry in self.entries]
        self.root: type = type(roots[0])
        self.above: dict[type, ClassPlan] = {}
        self.is_split = False
        self.whole: Program | None = None
        self._inside = inside_of(class_of_program(root) or type(root) for root in roots)

    def trace(self) -> None:
        """Runs every entry, and the model with other sizes."""
        runs = Runs(self.entries, self._inside, watched_lines, self.on_progress)
        self.watch, self.varied, self.notes = runs.watch, runs.varied, runs.notes
        runs.run()
        self.program: Program = self._collected()
        if run_further(self.program, self.entries, self.watch):
            self.program = self._collected()
        self._is_fresh = True
        # What is compared by parts later was one model first.
        self.whole = self.whole or self.program

    def _collected(self) -> Program:
        program = collect(self.watch.records, self._inside)
        program.keep_names = self.keep_names
        program.entries = len(self.entries)
        return program

    def run(self) -> None:
        """Rewrites until the proof holds."""
        for _ in range(_MOST_ROUNDS):
            self.write()
            if self._split():
                continue
            self.on_progress("proving")
            culprit = self._proven()
            if culprit is None:
                self._vary_fields()
                return
            blame, cls, refusal = culprit
            if cls in self.left:
                cls = blame.outermost()
                if cls is None:
                    return
            self.left[cls] = refusal

    @property
    def tops(self) -> list[type]:
        """The classes of the models that the entries make."""
        return [root.cls for root in self.program.roots]

    def _split(self) -> bool:
        """Goes on with the parts of what stays Linen itself, if there are any."""
        parts = parts_of(self.program, self.entries)
        if parts is None:
            return False
        for cls, refusal in parts.refused.items():
            self.program.plans[cls].refuse(refusal)
        every = parts.entries
        kept = [each for each in every if each in self.entries or self._runs(each)]
        self.above |= {c: p for c, p in self.program.plans.items() if p.refusal is not None}
        if kept:
            self.entries, self.is_split = kept, True
            self.trace()
        return bool(kept) or len(every) > len(kept)

    def _runs(self, part: Entry) -> bool:
        try:
            run_entry(Watch(self._inside, watched_lines), part)
        except RewriteError:
            plan = self.program.plans[type(part.make())]
            refusal = refused("cannot-run-alone")
            plan.refuse(refusal)
            self.left[plan.cls] = refusal
            return False
        return True

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
                plan.refuse(self.left[cls])
            if isinstance(plan, FunctionPlan):
                continue
            if self.only is not None and plan.name not in self.only:
                plan.refuse(refused("not-asked-for"))
            if plan.name in self.skip:
                plan.refuse(refused("skipped"))
        for plan in self.program.plans.values():
            left = plan.left_around(self.program) if isinstance(plan, FunctionPlan) else None
            if left is not None:
                plan.refuse(refused("around-left", name=left))
            for slot in plan.slots.values():
                made = called_function(self.program, slot)
                if made is None:
                    continue
                if made.refusal is not None:
                    reason = f"{made.name} makes one of its layers: {made.refusal.reason}"
                    line = slot.node.lineno
                    plan.refuse(dataclasses.replace(made.refusal, reason=reason, line=line))
                elif made.source is not plan.source and not _is_plain_name(slot.node.func):
                    plan.refuse(refused("function-elsewhere", slot.node.lineno))
            for base in plan.bases:
                if base.refusal is not None:
                    plan.refuse(refused("base-left", base=base.name))
            if not any(i.cls is plan.cls for i in self.watch.records.instances.values()) and not (
                any(plan in other.bases for other in self.program.plans.values())
            ):
                plan.refuse(refused("not-called"))

    def _write(self) -> None:
        program = self.program
        modules = modules_of(program)
        references = {
            file: References(program, source, vars(sys.modules[modules[file]]))
            for file, source in program.sources.items()
            if file in modules
        }
        for plan in program.plans.values():
            if plan.refusal is not None:
                continue
            try:
                for base in plan.bases:
                    # What the parent's constructor needs, for the instances of the child.
                    for name, size in base.sizes.items():
                        plan.sizes.setdefault(name, SizeArgument(name, dict(size.values)))
                names = references[plan.source.file]
                if isinstance(plan, FunctionPlan):
                    written = FunctionText(program, plan, names).written()
                else:
                    written = ClassText(program, plan, names).written()
                compile(written.text, plan.name, "exec")
                program.written[plan.cls] = written
            except NotRewritableError as error:
                left = error.refusal
            except SyntaxError as error:
                left = refused("not-parsed", error=error.msg)
            except Exception as error:
                left = refused("rewriter-failed", error=said(error))
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
        rewritten = [plan for plan in program.plans.values() if plan.refusal is None]
        files = [f for f in modules if any(plan.source.file == f for plan in rewritten)]
        makers = {
            each for p in rewritten for each in p.makers.values() if each.source is not p.source
        }
        modules = modules | {each.source.file: each.module for each in makers}
        files = list(dict.fromkeys([*files, *sorted(each.source.file for each in makers)]))
        # The model's file is the last one: the rules are named after it.
        main = program.plans.get(self.tops[0])
        files.sort(key=lambda file: main is not None and file == main.source.file)
        program.new_modules = {modules[file]: f"{modules[file]}{SUFFIX}" for file in files}
        self.files = [NewFile(program, program.sources[file], modules[file]) for file in files]
        extra: dict[str, set[str]] = {f.module: set() for f in self.files}
        for each in makers:
            extra[each.module].add(each.function.name)
        is_complete = False
        while not is_complete:
            is_complete = True
            self.texts = {f.name: (str(f.path), f.text(extra[f.module])) for f in self.files}
            for file in self.files:
                for module, names in file.read_elsewhere(self.texts[file.name][1]).items():
                    is_complete &= names <= extra[module]
                    extra[module] |= names

    def _proven(self) -> tuple[Blame, type, Refusal] | None:
        """What failed and why, None if nothing did."""
        self.proof = None
        plans = [self.program.plan_of(top) for top in self.tops]
        if any(plan is None or plan.refusal is not None for plan in plans):
            return None
        blame = self._blame()
        hidden = blame.hidden()
        if hidden is not None:
            return blame, hidden, refused("inside-linen")
        try:
            proof = prove(
                self.program,
                self.entries,
                self.files,
                self.texts,
                self.varied,
                gradients=self.gradients,
            )
        except EntryError as error:
            blame, cause = self._blame(error.run), error.cause
            if isinstance(cause, NotRewritableError):
                return blame, self.tops[error.run], cause.refusal
            return blame, *blame.of_error(cause)
        except Exception as error:
            return blame, *blame.of_error(error)
        self.proof = proof
        if proof.ok:
            return None
        blame = self._blame(proof.place)
        return blame, *blame.of_difference(proof)

    def _vary_fields(self) -> None:
        if self.proof is None:
            return
        self._variation = variation = FieldVariation(
            self.program, self.entries, self.watch, self.files, self.texts, self.on_progress
        )
        if self.varies:
            variation.run()
        else:
            variation.leave_out()
        self.limits = variation.limits

    def as_linen(self) -> AsLinen | None:
        """The old files with Linen classes that run NNX classes, None if nothing is proven."""
        if self.proof is None or not self.proof.ok:
            return None
        return AsLinen(
            self.program,
            self.entries,
            self.varied,
            self.files,
            self.texts,
            self.on_progress,
            self._variation if self.varies else None,
        )

    def in_place(self, training: Training = Training()) -> InPlace:  # noqa: B008 - it is frozen
        """The old files with NNX classes in them."""

        def fault(texts: Mapping[str, tuple[str, str]]) -> str | None:
            return fault_in_place(self.program, self.entries, self.files, texts)

        is_whole = self.proof is not None and self.proof.ok and not self.is_split
        return InPlace(self.files, fault, training, is_proven=is_whole)

    def _blame(self, run: int = 0) -> Blame:
        return Blame(self.program, run, self.files, self.texts, self.left)


def _is_plain_name(node: ast.expr) -> bool:
    """Whether a function is called as `name` or as `module.name`."""
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
