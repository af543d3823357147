"""The whole rewriting: trace, write, prove, and again without what failed."""

from __future__ import annotations

import collections
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge._errors import BridgeError

from . import _trace
from ._class_text import ClassText
from ._collect import collect, inside_of
from ._entries import Entry, branches, combined, shaped, variations
from ._files import SUFFIX, NewFile, modules_of
from ._paths import Paths
from ._plans import ClassPlan, LeftLinenError, Program
from ._proof import Proof, ProofError, prove, training_kwargs
from ._references import References
from ._source import Source, source_of

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
        self, entries: Sequence[Entry], *, keep_names: bool, only: Sequence[str] | None,
        skip: Sequence[str], told: Callable[[str], None], gradients: bool = True,
    ) -> None:
        self.entries, self.keep_names = list(entries), keep_names
        self.only, self.skip, self.told = only, skip, told
        self.gradients = gradients
        self.left: dict[type, tuple[str, int | None]] = {}
        self.notes: list[str] = []
        self.files: list[NewFile] = []
        self.texts: dict[str, tuple[str, str]] = {}
        self.proof: Proof | None = None
        self.root: type = type(self.entries[0].make())
        self._inside = inside_of(self.root)

    def trace(self) -> None:
        """Runs every entry, and the model with other sizes."""
        watch = _trace.Watch(self._inside, _watched_lines)
        for number, entry in enumerate(self.entries):
            self.told(f"tracing entry {number + 1}")
            _trace.run(watch, entry.make(), *_called(shaped(entry)))
        self._vary(watch)
        self.watch = watch
        self.program: Program = self._collected()

    def _vary(self, watch: _trace.Watch) -> None:
        started, failed = time.monotonic(), 0
        for entry in self.entries:
            module = entry.make()
            training = training_kwargs(entry)
            if training is not None:
                try:
                    _trace.run(watch, entry.make(), entry.inputs, training, entry.method)
                except Exception:  # noqa: BLE001 it may need a stream that is not known
                    self.notes.append("the model was not traced in training: it raised")
            together = combined(module, entry.inputs)
            every = variations
            if together is not None:
                try:
                    _trace.run(watch, *together, entry.kwargs, entry.method)
                    every = branches
                except Exception:  # noqa: BLE001 then one at a time
                    failed += 1
            for number, (changed, inputs) in enumerate(every(module, entry.inputs)):
                if time.monotonic() - started > _SECONDS_FOR_VARIATIONS or (
                    number >= _MOST_VARIATIONS
                ):
                    self.notes.append("not all sizes were varied: it would have taken too long")
                    return
                self.told(f"tracing with other sizes, {number + 1}")
                try:
                    _trace.run(watch, changed, inputs, entry.kwargs, entry.method)
                except Exception:  # noqa: BLE001 a model may refuse any other size
                    failed += 1

    def _collected(self) -> Program:
        program = collect(self.watch.records, self._inside)
        program.keep_names = self.keep_names
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
                cls = self._outermost()
                if cls is None:
                    return
            self.left[cls] = (reason, None)

    def write(self) -> None:
        """Writes the new texts, without a proof."""
        self.program = self._collected()
        self._leave()
        self._write()

    def _leave(self) -> None:
        for cls, plan in self.program.plans.items():
            if cls in self.left:
                plan.leave(*self.left[cls])
            if self.only is not None and plan.name not in self.only:
                plan.leave("it is not among those that were asked for")
            if plan.name in self.skip:
                plan.leave("it was to be left out")
        for plan in self.program.plans.values():
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
            for file, source in program.sources.items() if file in modules
        }
        for plan in program.plans.values():
            if plan.reason is not None:
                continue
            try:
                for base in plan.bases:
                    _inherit(plan, base)
                plan.text = ClassText(program, plan, references[plan.source.file]).text()
                compile(plan.text, plan.name, "exec")
            except LeftLinenError as error:
                self.left[plan.cls] = (error.reason, error.line)
                raise_again = True
            except SyntaxError as error:
                self.left[plan.cls] = (f"its new text does not parse: {error.msg}", None)
                raise_again = True
            except Exception as error:  # noqa: BLE001 a fault of ours must not end the rewriting
                self.left[plan.cls] = (f"the rewriter failed: {type(error).__name__}: {error}", None)
                raise_again = True
            else:
                raise_again = False
            if raise_again:
                self.program = self._collected()
                self._leave()
                self._write()
                return
        self._assemble(modules)

    def _assemble(self, modules: dict[str, str]) -> None:
        program = self.program
        files = [file for file in modules if any(
            p.reason is None and p.source.file == file for p in program.plans.values())]
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
        hidden = self._hidden()
        if hidden is not None:
            return hidden, "it is used only inside of what stays Linen"
        try:
            self.proof = prove(self.program, self.entries, self.files, self.texts, gradients=self.gradients)
        except LeftLinenError as error:
            return root, error.reason
        except Exception as error:  # noqa: BLE001 whatever the new program raises
            if isinstance(error, BridgeError) and "KeyboardInterrupt" in str(error):
                raise
            return self._blamed(error, root)
        if self.proof.ok:
            return None
        return self._diverged(root)

    def _hidden(self) -> type | None:
        """A rewritten class that the new model has nowhere."""
        seen: set[type] = set()
        for run in range(len(self.entries)):
            wrapped = Paths(self.program, run).wrapped()
            for (own, path), instance in self.watch.records.instances.items():
                if own == run and not any(path[:n] in wrapped for n in range(len(path) + 1)):
                    seen |= {base for base in instance.cls.__mro__ if base in self.program.plans}
        return next((cls for cls, plan in self.program.plans.items()
                     if plan.reason is None and cls not in seen), None)

    def _blamed(self, error: Exception, root: type) -> tuple[type, str]:
        text = (str(error).strip().splitlines() or [""])[0][:200]
        reason = f"the new class raised {type(error).__name__}: {text}"
        by_file = {f.path.as_posix(): f for f in self.files}
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            file = by_file.get(frame.filename)
            if file is None or frame.lineno is None:
                continue
            plan = _class_at(self.texts[file.name][1], frame.lineno, file.plans)
            if plan is not None and plan.cls not in self.left:
                return plan.cls, reason
        if isinstance(error, ProofError):
            for path in error.paths:
                cls = self._class_of(path)
                if cls is not None:
                    return cls, reason
        return self._first_open() or root, reason

    def _class_of(self, path: tuple[str, ...]) -> type | None:
        """The innermost rewritten class around a path."""
        while True:
            instance = self.watch.records.instances.get((0, path))
            if instance is not None:
                plan = self.program.plan_of(instance.cls)
                if plan is not None and plan.reason is None:
                    return plan.cls
            if not path:
                return None
            path = path[:-1]

    def _diverged(self, root: type) -> tuple[type, str]:
        proof = self.proof
        reason = "its values differ from those of the Linen class"
        place = proof.first_place if proof is not None else None
        if place is not None:
            cls = self._class_of(tuple(place.split("/")) if place else ())
            if cls is not None:
                return cls, reason
        return self._first_open() or root, reason

    def _first_open(self) -> type | None:
        """The innermost class that is still rewritten."""
        return next((c for c, p in self.program.plans.items() if p.reason is None), None)

    def _outermost(self) -> type | None:
        found = [c for c, p in self.program.plans.items() if p.reason is None]
        return found[-1] if found else None


def _called(entry: Entry) -> Any:
    return entry.inputs, entry.kwargs, entry.method


def _inherit(plan: ClassPlan, base: ClassPlan) -> None:
    """The sizes that the parent's constructor needs, for the instances of the child."""
    from ._plans import SizeArgument

    for name, size in base.sizes.items():
        plan.sizes.setdefault(name, SizeArgument(name, dict(size.values)))


def _class_at(text: str, line: int, plans: Sequence[ClassPlan]) -> ClassPlan | None:
    import ast

    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            return next((p for p in plans if p.name == node.name and p.reason is None), None)
    return None


_WATCHED: dict[str, frozenset[int]] = {}


def _watched_lines(file: str) -> frozenset[int]:
    """The lines of conditions."""
    import ast
    import pathlib

    if file not in _WATCHED:
        try:
            source: Source = source_of(file, pathlib.Path(file).stat().st_mtime)
            _WATCHED[file] = frozenset(
                node.test.lineno for node in ast.walk(source.tree)
                if isinstance(node, ast.If | ast.IfExp)
                and any(isinstance(n, ast.Attribute) and n.attr in ("shape", "ndim")
                        or isinstance(n, ast.Name) for n in ast.walk(node.test)))
        except (SyntaxError, UnicodeDecodeError, OSError):
            _WATCHED[file] = frozenset()
    return _WATCHED[file]


def counts(program: Program) -> collections.Counter[str]:
    """How many classes are rewritten and how many stay."""
    return collections.Counter(
        "left Linen" if p.reason is not None else "rewritten" for p in program.plans.values())


def is_model(value: Any) -> bool:
    """Whether a value is a Linen module."""
    return isinstance(value, nn.Module)


def spec(shape: Sequence[int], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """A sample input."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
