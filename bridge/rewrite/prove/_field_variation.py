"""Compares each rewritten class with the Linen class for other values of its fields.

A program is used with other values than those it was proven with. Each rewritten class is made
and called as the model calls it, with one field changed at a time, where Linen itself takes the
value: weights, outputs and state have to agree.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from bridge._train_eval import MODE_NAMES
from bridge.rewrite.emit._files import NewFile
from bridge.rewrite.observe._entries import Entry, Varied, difference, shaped
from bridge.rewrite.observe._records import Instance, below
from bridge.rewrite.observe._runs import run
from bridge.rewrite.observe._steps import COLLECTION
from bridge.rewrite.observe._trace import Watch
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._plans import ClassPlan, Program

from ._build import Maker, importable
from ._other_values import compared_words, other_sizes, other_values, types_of
from ._parts import entry_of, first_calls
from ._proof import NO_NUMBERS, Prover

_SECONDS = 120.0
# The first other value of each field, and as many more as there is room for.
_MOST_VALUES = 20
_NOT_VARIED = "its fields were not varied"
_TOO_LONG = "not all of its fields were varied: it would have taken too long"
_ALONE = f"{_NOT_VARIED}: it cannot be made apart from the model"


class FieldVariation:
    """Varies the fields of all rewritten classes.

    The program is already proven with the fields that were given. `texts` has file and text by the
    new module's name. `on_progress` is given a line about what goes on. `limits` says by class for
    which values it was not proven, and why.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Entry],
        watch: Watch,
        files: Sequence[NewFile],
        texts: Mapping[str, tuple[str, str]],
        on_progress: Callable[[str], None],
    ) -> None:
        self.program, self.entries = program, [*map(shaped, entries)]
        self.watch, self.on_progress = watch, on_progress
        self.files, self.texts = files, texts
        self.limits: dict[type, list[str]] = {}
        self._words = compared_words(source.tree for source in program.sources.values())

    @property
    def _plans(self) -> list[ClassPlan]:
        return [
            plan
            for plan in self.program.plans.values()
            if plan.refusal is None and not isinstance(plan, FunctionPlan)
        ]

    def others(self, plan: ClassPlan) -> list[tuple[str, Any]]:
        """Fields of a class, each with another value."""
        return [each for own in self._instances(plan)[:1] for each in self._values(own, plan)]

    def leave_out(self) -> None:
        """Notes of every class with fields that it was not compared for other values of them."""
        for plan in self._plans:
            if _names(plan):
                self._note(plan, _NOT_VARIED)

    def run(self) -> None:
        """Compares the classes for all values, a value of each class in turn."""
        started = time.process_time()
        with importable(self.texts):
            modules = {f.module: importlib.import_module(f.name) for f in self.files}
            left = [
                (plan, self._varied(plan, alike, modules))
                for plan in self._plans
                for alike in self._by_layers(plan)
            ]
            while left:
                if time.process_time() - started > _SECONDS:
                    for plan, _ in left:
                        self._note(plan, _TOO_LONG)
                    return
                left = [each for each in left if next(each[1], False)]

    def _note(self, plan: ClassPlan, text: str) -> None:
        known = self.limits.setdefault(plan.cls, [])
        if text not in known:
            known.append(text)

    def _by_layers(self, plan: ClassPlan) -> list[list[Instance]]:
        """The instances of a class, those together that ran the same constructors."""
        found: dict[frozenset[Any], list[Instance]] = {}
        for instance in self._instances(plan):
            key = (instance.run, instance.path)
            ran = frozenset(
                node
                for node, slot in plan.slots.items()
                if any((making.run, making.owner) == key for making in slot.makings)
            )
            found.setdefault(ran, []).append(instance)
        return list(found.values())

    def _varied(
        self, plan: ClassPlan, instances: Sequence[Instance], modules: Mapping[str, Any]
    ) -> Iterator[bool]:
        """Makes one comparison at each step."""
        values = self._values(instances[0], plan)
        found = self._sample(instances, modules) if values else None
        if found is None:
            if values:
                self._note(plan, _ALONE)
            return
        entry, maker = found
        yield True
        # Where all sizes differ, no size can be taken for another.
        others: dict[str, Any] = {}
        for sizes in other_sizes(entry.make(), _names(plan)):
            holds = self._holds(plan, entry, maker, sizes)
            yield True
            if holds is not None:
                others = sizes if holds else {}
                break
        refused: dict[str, bool] = {}
        for name, value in values:
            is_size = name in others or type(value) is int
            more = {} if is_size else others
            holds = self._holds(plan, entry, maker, {**more, name: value})
            if holds is None and more:
                holds = self._holds(plan, entry, maker, {name: value})
            refused[name] = refused.get(name, True) and holds is None
            yield True
        model = entry.make()
        for name, is_refused in refused.items():
            # No number may fit beside the other fields.
            if is_refused and getattr(model, name) is None:
                self._note(plan, f"{name} was not varied: Linen refuses the values that were tried")

    def _instances(self, plan: ClassPlan) -> list[Instance]:
        """The instances in the program's own runs if there are any, the smallest first."""
        records = self.program.records
        every = [each for each in records.instances.values() if each.cls is plan.cls]
        own = [each for each in every if each.run < self.program.entries] or every

        def size(instance: Instance) -> int:
            leaves = jax.tree.leaves(below(records.variables[instance.run], instance.path))
            return sum(each.size for each in leaves)

        return sorted(own, key=size)

    def _values(self, instance: Instance, plan: ClassPlan) -> list[tuple[str, Any]]:
        """Fields, each with another value."""
        types, names = types_of(plan.cls), _names(plan)
        own = [
            [(name, each) for each in others]
            for name, value in instance.fields.items()
            if name in names and not self._is_passed_on(instance, value)
            for others in other_values(value, types.get(name), name, self._words)
        ]
        turns = [each for turn in itertools.zip_longest(*own) for each in turn if each is not None]
        return turns[: max(_MOST_VALUES, len(own))]

    def _is_passed_on(self, instance: Instance, value: Any) -> bool:
        """Whether a configuration is the model's own: it varies there, inputs and all."""
        if not instance.path or not dataclasses.is_dataclass(value) or isinstance(value, type):
            return False
        root = self.program.records.instances[(instance.run, ())]
        return any(type(each) is type(value) for each in root.fields.values())

    def _sample(
        self, instances: Iterable[Instance], modules: Mapping[str, Any]
    ) -> tuple[Entry, _OwnMaker] | None:
        """One instance and a call of it that both classes can do by themselves, and do alike.

        The model itself was proven with its own fields.
        """
        for instance in instances:
            is_model = not instance.path and instance.run < self.program.entries
            calls = () if is_model else first_calls(instance)
            own = [self.entries[instance.run]] if is_model else []
            for entry in [*own, *(entry_of(self.program, instance, called) for called in calls)]:
                if entry is not None:
                    maker = _OwnMaker(self.program, modules, instance)
                    is_proven = is_model and maker.is_complete
                    if is_proven or self._limits(entry, maker, {}) == []:
                        return entry, maker
        return None

    def _holds(
        self, plan: ClassPlan, entry: Entry, maker: _OwnMaker, fields: Mapping[str, Any]
    ) -> bool | None:
        """Whether both classes do the same, which is noted; None where Linen refuses the fields."""
        self.on_progress(f"proving {plan.name} with other fields")
        limits = self._limits(entry, maker, fields)
        for text in limits or ():
            self._note(plan, text)
        return None if limits is None else not limits

    def _limits(
        self, entry: Entry, maker: _OwnMaker, fields: Mapping[str, Any]
    ) -> list[str] | None:
        """What differs with other fields; None where Linen refuses them."""
        try:
            model = entry.make()
            changed = model.clone(**fields)
            number = run(self.watch, changed, *entry.called)
        except Exception:
            return None
        if COLLECTION in self.program.records.variables[number] and not maker.is_complete:
            # A constructor that makes caches is told their shape, which this model never was.
            return None
        what = ", ".join(difference(model, changed))
        prover = Prover(self.program, maker, gradients=False)
        own = dataclasses.replace(entry, make=lambda: changed)
        prover.varied(Varied(number, own, what, is_flag=True))
        limits = [text for text in prover.limits if not text.endswith(NO_NUMBERS)]
        if any(not report.ok for report in prover.reports.values()):
            limits.append(f"with {what} it returns something else")
        return limits


def _names(plan: ClassPlan) -> set[str]:
    """The fields that the new constructor takes; modes are arguments of calls."""
    return {field.name for field in plan.fields} - plan.mode_fields - {*MODE_NAMES}


class _OwnMaker(Maker):
    """Makes the new class with the size arguments that one instance was given."""

    def __init__(self, program: Program, modules: Mapping[str, Any], model: Instance) -> None:
        super().__init__(program, modules)
        self._sizes = super().sizes(model)

    def make(self, root: Instance, rngs: nnx.Rngs) -> Any:
        made = super().make(root, rngs)
        carried = self.program.plans[root.cls].carried
        # The model's call would tell the modes that the fields bring along.
        modes = {
            mode: root.fields[name].keywords[mode]
            for name, own in carried.items()
            if isinstance(root.fields.get(name), functools.partial)
            for mode in own & root.fields[name].keywords.keys()
        }
        if modes:
            made.set_attributes(**modes, raise_if_not_found=False)
        return made

    @property
    def is_complete(self) -> bool:
        """Whether the instance was given every size argument."""
        return None not in self._sizes.values()

    def sizes(self, root: Instance) -> dict[str, Any]:
        return self._sizes if root.path == () else super().sizes(root)
