"""The old files with Linen classes that run the new NNX classes, for programs that stay Linen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import nnx

from bridge.rewrite._failures import said
from bridge.rewrite.emit._files import NewFile
from bridge.rewrite.emit._linen_class import UnfitError, linen_class_text
from bridge.rewrite.emit._states import DRAWS
from bridge.rewrite.observe._entries import Entry, Varied
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._plans import ClassPlan, Program
from bridge.rewrite.prove._build import Maker, importable
from bridge.rewrite.prove._draws import streams
from bridge.rewrite.prove._field_variation import FieldVariation
from bridge.rewrite.prove._interfaces import Interfaces
from bridge.rewrite.prove._linen_check import fault, fault_of_fields
from bridge.rewrite.prove._pairing import made
from bridge.rewrite.prove._parts import entry_of, first_calls
from bridge.rewrite.syntax._source import Edit, bound_in, is_import

from ._in_place import behind_flax
from ._writing import check_sources


class AsLinen:
    """What `write` writes with `as_linen=True`, besides the new files.

    Attributes:
        exported: the classes that run NNX classes.
        left: why other classes stay as they are, by name.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Entry],
        varied: Sequence[Varied],
        files: Sequence[NewFile],
        texts: Mapping[str, tuple[str, str]],
        on_progress: Callable[[str], None],
        variation: FieldVariation | None,
    ) -> None:
        self.program, self.entries, self.varied = program, entries, varied
        self._variation = variation
        self._with_other_fields: set[type] = set()
        self.files, self._texts, self._on_progress = files, texts, on_progress
        self.left: dict[str, str] = {}
        self._pieces: dict[type, str] = {}
        self._find()

    @property
    def exported(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(cls.__name__ for cls in self._pieces)

    def texts(self) -> dict[str, str]:
        """The new texts of the old files by path.

        Raises RewriteError if a file was changed since it was read.
        """
        check_sources(f.source for f in self.files)
        return {
            f.source.file: self._text(f)
            for f in self.files
            if any(plan.cls in self._pieces for plan in f.plans)
        }

    def _find(self) -> None:
        with importable(self._texts):
            modules = {f.module: importlib.import_module(f.name) for f in self.files}
            maker = Maker(self.program, modules)
            runs = [*range(self.program.entries), *(each.run for each in self.varied)]
            models: dict[int, Any] = {}
            for run in runs:
                root = self.program.records.instances[(run, ())]
                try:
                    models[run] = made(maker, root)
                except Exception:
                    # The proof has told that.
                    continue
            interfaces = Interfaces(self.program, models)
        for plan in self._candidates():
            try:
                self._pieces[plan.cls] = linen_class_text(plan, interfaces.of(plan))
            except UnfitError as error:
                self.left[plan.name] = str(error)
        while (failed := self._failed()) is not None:
            cls, why = failed
            del self._pieces[cls]
            self.left[cls.__name__] = why

    def _candidates(self) -> Iterable[ClassPlan]:
        by_file = {f.source: f for f in self.files}
        rewritten = {p.cls for p in self.program.plans.values() if p.refusal is None}
        for plan in self.program.plans.values():
            if plan.refusal is not None or isinstance(plan, FunctionPlan):
                continue
            file = by_file[plan.source]
            derived = [
                each.__name__
                for each in plan.cls.__subclasses__()
                if each not in rewritten and _is_global(each)
            ]
            if plan.layer is not None:
                self.left[plan.name] = f"it derives from {plan.layer.__name__} of Flax"
            elif plan.node not in file.source.tree.body:
                self.left[plan.name] = "it is not at the top of its file"
            elif derived:
                self.left[plan.name] = f"{derived[0]} derives from it"
            elif reviewed := [each for each in self.program.notes_of(plan) if each[1] != DRAWS]:
                line, text = reviewed[0]
                self.left[plan.name] = f"it needs review, line {line}: {text}"
            else:
                yield plan

    def _failed(self) -> tuple[type, str] | None:
        """A class that differs, and how; None if all are proven."""
        if not self._pieces:
            return None
        self._on_progress("proving the Linen classes that run NNX classes")
        own = {f.module: (f.source.file, self._text(f)) for f in self.files}
        keys = streams(self.program)
        with importable({**own, **self._texts}), nnx.use_eager_sharding(False):
            try:
                modules = {f.module: importlib.import_module(f.module) for f in self.files}
            except Exception as error:
                first = next(iter(self._pieces))
                return first, f"the new text raised {said(error)}"
            classes = {
                plan.cls: getattr(modules[plan.cls.__module__], plan.name)
                for plan in self.program.plans.values()
                if not isinstance(plan, FunctionPlan)
                and plan.cls.__module__ in modules
                and hasattr(modules[plan.cls.__module__], plan.name)
            }
            for cls in self._pieces:
                for entry, computes in self._entries_of(cls):
                    why = fault(entry, classes, keys, computes=computes)
                    if why is not None:
                        return cls, why
            for entry in self.entries:
                is_known = type(entry.make()) in self._pieces
                why = None if is_known else fault(entry, classes, keys, computes=True)
                if why is not None:
                    return next(iter(self._pieces)), f"the whole program differs: {why}"
            return self._failed_with_other_fields(classes, keys)

    def _failed_with_other_fields(
        self, classes: Mapping[type, Any], keys: Mapping[str, Any]
    ) -> tuple[type, str] | None:
        """The same for other values of each class's fields, which the program may use elsewhere."""
        for cls in [each for each in self._pieces if each not in self._with_other_fields]:
            plan = self.program.plans[cls]
            entry, _ = next(iter(self._entries_of(cls)), (None, False))
            if self._variation is None or entry is None:
                continue
            self._on_progress(f"proving the Linen class {plan.name} with other fields")
            # Numbers are compared where the NNX class is known to differ for some values.
            computes = cls in self._variation.limits
            for name, value in self._variation.others(plan):
                why = fault_of_fields(entry, {name: value}, classes, keys, computes=computes)
                if why is not None:
                    return cls, why
            self._with_other_fields.add(cls)
        return None

    def _entries_of(self, cls: type) -> Iterable[tuple[Entry, bool]]:
        """Calls of a class by itself, and whether to compute them: not those of other sizes.

        For those the NNX class has been proven.
        """
        records = self.program.records
        computed = {*range(self.program.entries), *(v.run for v in self.varied if v.is_flag)}
        seen: set[str] = set()
        roots = [*zip(range(self.program.entries), self.entries, strict=True)]
        roots += [(each.run, each.entry) for each in self.varied]
        for run, entry in roots:
            if records.instances[(run, ())].cls is cls:
                yield entry, run in computed
                seen.add("")
        for instance in records.instances.values():
            if instance.cls is not cls or not instance.path:
                continue
            for called in first_calls(instance):
                key = repr((instance.fields, called.method, called.args, called.kwargs))
                entry = None if key in seen else entry_of(self.program, instance, called)
                seen.add(key)
                if entry is not None:
                    yield entry, instance.run in computed

    def _text(self, file: NewFile) -> str:
        """An old file with the new Linen classes in it."""
        source = file.source
        edits = [
            Edit(source.start(plan.node), source.end(plan.node), self._pieces[plan.cls])
            for plan in file.plans
            if plan.cls in self._pieces
        ]
        imports = (node for node in source.tree.body if is_import(node))
        if edits and not any("bridge" in bound_in(node) for node in imports):
            edits.append(behind_flax(source, ["import bridge"]))
        return source.stretch(0, len(source.data), edits)


def _is_global(cls: type) -> bool:
    """Whether a program can name a class: not one that a lifted transform has made."""
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
