"""Finds the class that a failed proof is due to."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Collection, Mapping, Sequence

from bridge.rewrite.emit._files import NewFile
from bridge.rewrite.plan._plans import ClassPlan, Program
from bridge.rewrite.plan._refusals import Refusal, refused

from ._paths import Paths
from ._proven import Proof, ProofError


class Blame:
    """Finds the class that goes back to Linen.

    `run` is the run of the entry that failed; the classes of its model come into question. `texts`
    has file and text by the new module's name. `left` has the classes that went back before.
    """

    def __init__(
        self,
        program: Program,
        run: int,
        files: Sequence[NewFile],
        texts: Mapping[str, tuple[str, str]],
        left: Collection[type],
    ) -> None:
        self.program, self.run, self.files = program, run, files
        self.texts, self.left = texts, left

    def hidden(self) -> type | None:
        """A rewritten class that the new model has nowhere."""
        records, seen = self.program.records, set[type]()
        tops = {root.cls for root in self.program.roots}
        for run in range(len(records.variables)):
            if getattr(records.instances.get((run, ())), "cls", None) not in tops:
                # A part that was run by itself is not the model.
                continue
            wrapped = Paths(self.program, run).wrapped()
            for (own, path), instance in records.instances.items():
                if own == run and not any(path[:n] in wrapped for n in range(len(path) + 1)):
                    seen |= {base for base in instance.cls.__mro__ if base in self.program.plans}
        # A class makes those below it first.
        for plan in reversed(self.program.plans.values()):
            slots = plan.slots.values() if plan.cls in seen and plan.refusal is None else ()
            # Some are made and not called.
            made = (m for slot in slots if not slot.is_wrapped for m in slot.makings)
            seen |= {base for m in made for base in (records.base_of(m.cls) or object).__mro__}
        found = self.program.plans.items()
        return next((cls for cls, p in found if p.refusal is None and cls not in seen), None)

    def of_error(self, error: Exception) -> tuple[type, Refusal]:
        """The class for what the new program raised, with the refusal."""
        text = (str(error).strip().splitlines() or [""])[0][:200]
        refusal = refused("new-class-raises", error=f"{type(error).__name__}: {text}")
        by_file = {f.path.as_posix(): f for f in self.files}
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            file = by_file.get(frame.filename)
            if file is None or frame.lineno is None:
                continue
            plan = _class_at(self.texts[file.name][1], frame.lineno, file.plans)
            if plan is not None and plan.cls not in self.left:
                return plan.cls, refusal
        for path in error.paths if isinstance(error, ProofError) else ():
            cls = self._class_of(path, self.run)
            if cls is not None:
                return cls, refusal
        return self._any(), refusal

    def of_difference(self, proof: Proof) -> tuple[type, Refusal]:
        """The class whose values differ."""
        cls = None
        if proof.first_place is not None:
            place = proof.first_place
            cls = self._class_of(tuple(place.split("/")) if place else (), proof.place)
        return cls or self._any(), refused("values-differ")

    def outermost(self) -> type | None:
        """The class that is built of all others that are still rewritten."""
        return next(reversed(self._rewritten()), None)

    def _any(self) -> type:
        """The innermost class, or that of the model."""
        model = self.program.records.instances[(self.run, ())].cls
        return next(iter(self._rewritten()), model)

    def _rewritten(self) -> list[type]:
        """The classes of the entry that are still rewritten, or all of them if none is."""
        instances = self.program.records.instances.values()
        own = {base for each in instances if each.run == self.run for base in each.cls.__mro__}
        found = [cls for cls, plan in self.program.plans.items() if plan.refusal is None]
        return [cls for cls in found if cls in own] or found

    def _class_of(self, path: tuple[str, ...], run: int) -> type | None:
        """The innermost rewritten class around a path."""
        while True:
            instance = self.program.records.instances.get((run, path))
            plan = None if instance is None else self.program.plan_of(instance.cls)
            if plan is not None and plan.refusal is None:
                return plan.cls
            if not path:
                return None
            path = path[:-1]


def _class_at(text: str, line: int, plans: Sequence[ClassPlan]) -> ClassPlan | None:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            return next((p for p in plans if p.name == node.name and p.refusal is None), None)
    return None
