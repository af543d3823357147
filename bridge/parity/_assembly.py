"""The parts of a check put together: the programs and the observation run, the sections made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optax

from . import _sections, _training
from ._captured import Trace
from ._divergence import Divergence, Layers, compare_layers
from ._dropout import evaluating, remedy
from ._layouts import Layouts
from ._models import Model, Observing, Request
from ._numbers import Compared
from ._recorder import trace
from ._report import SECTIONS, Report, Section
from ._sections import Sides

_MOST_PLACES = 8


class Assembly:
    """A check under way.

    Args:
      sides: the models and how they correspond.
      requests: how each is called.
      chosen: the sections that the report has.
      is_training: whether dropout is meant to be on.
      are_named: whether the caller named the sections, so that static fields count.
    """

    def __init__(
        self,
        sides: Sides,
        requests: tuple[Request, Request],
        chosen: Set[str],
        is_training: bool,
        are_named: bool,
    ):
        self._sides, self._requests, self._chosen = sides, requests, chosen
        self._is_training, self._are_named = is_training, are_named
        self._traces: tuple[Trace, ...] = ()
        self._layers: Layers | None = None

    def run(self, *, jit: bool, is_observed: bool) -> None:
        """Runs both models; what is compiled is compiled while layers are observed."""
        with ThreadPoolExecutor(2) as pool:
            for program in self._sides.programs:
                if jit and program.is_wanted:
                    program.start(pool)
            if is_observed:
                self._traces = tuple(map(self._traced, self._sides.programs, self._requests))
            for program in self._sides.programs:
                program.first()
        if is_observed:
            a, b = self._traces
            sides = self._sides
            self._layers = compare_layers(a, b, sides.layouts, sides.table, dtypes=sides.dtypes)

    def report(self, steps: int, optimizer: optax.GradientTransformation) -> Report:
        """The comparison of everything that was chosen."""
        sides, layers = self._sides, self._layers
        order = self._order()
        makers: Mapping[str, Callable[[], Section]] = {
            "port plan": lambda: _plan(sides.layouts),
            "weights": lambda: _sections.weights(sides),
            "outputs": lambda: _sections.outputs(sides, *self._outputs()),
            "layers": self._layer_section,
            "fields": self._field_section,
            "gradients": lambda: _training.gradients(sides, order),
            "state": lambda: _sections.state(sides),
            "steps": lambda: _training.steps(sides, steps, optimizer),
            "partition specs": lambda: _sections.partition_specs(sides),
        }
        made = tuple(
            makers[name]()
            for name in SECTIONS
            if name in self._chosen and (name != "port plan" or sides.layouts.plan is not None)
        )
        a, b = (model.name for model in sides.models)
        first, inexact = (layers.first, layers.inexact) if layers else (None, None)
        report = Report(a, b, made, first, inexact)
        return dataclasses.replace(report, hints=tuple(self._hints(report)))

    def _traced(self, program: Any, request: Request) -> Trace:
        model: Model = program.model

        def run(observing: Observing) -> Any:
            return model.run(model.values, dataclasses.replace(request, observing=observing))[0]

        return trace(run, model.modes_of(request), is_traceable=program.is_compiled)

    def _outputs(self) -> tuple[Any, Any]:
        if self._traces:
            return self._traces[0].output, self._traces[1].output
        first, second = (program.first().output for program in self._sides.programs)
        return first, second

    def _order(self) -> dict[tuple[str, ...], int]:
        """When `a`'s layers were called, by path, if forward passes agree."""
        if self._layers is None or self._layers.first is not None:
            return {}
        return {call.path: number for number, call in enumerate(self._traces[0].calls)}

    def _layer_section(self) -> Section:
        found = self._layers
        if found is None:
            return Section("layers")
        notes = [f"{side}: {t.note}" for side, t in zip("ab", self._traces, strict=True) if t.note]
        for side, places in zip("ab", found.only, strict=True):
            if places:
                notes.append(f"calls without a counterpart, only in {side}: {_listed(places)}")
        if found.not_comparable:
            notes.append(f"calls not compared, of other shapes in and out: {found.not_comparable}")
        return Section("layers", found.compared, "; ".join(notes))

    def _field_section(self) -> Section:
        compared = []
        for place, differences in (self._layers.fields if self._layers else {}).items():
            compared += [
                Compared(f"{place}: {d.name}", "differs", values=(d.a, d.b)) for d in differences
            ] or [Compared(place, "bitwise")]
        note = "initialisers and functions without a name are not compared" if compared else ""
        return Section("fields", tuple(compared), note, is_advisory=not self._are_named)

    def _hints(self, report: Report) -> Iterable[str]:
        found = self._layers
        if not report.ok and self._is_training:
            yield from self._training_hints(report.first_divergence)
        if found is None:
            return
        if not report.ok and not self._is_training:
            both = zip("ab", found.dropping, self._sides.models, self._requests, strict=True)
            for side, places, model, request in both:
                if places:
                    how = remedy(model.module, model.function(request.method))
                    yield f"dropout is on in {side}, at {_listed(places)}: {how}"
        if found.nan_from and any(c.verdict == "nan" for s in report.sections for c in s.compared):
            yield f"NaN arises in both models in {found.nan_from}, whose inputs have none"

    def _training_hints(self, first: Divergence | None) -> Iterable[str]:
        for side, request in zip("ab", self._requests, strict=True):
            for name, value in evaluating(request.kwargs).items():
                yield (
                    f"{side} does not run as in training, as it is given {name}={value}: leave it"
                    f" out, or give kwargs={{{name!r}: {not value}}}"
                )
        if first and all(first.drops) and first.inputs_agree and not first.fields:
            yield (
                f"the masks of {first.place} differ: Linen and native NNX draw other keys; compare"
                " them without train=True, or with a rate of 0"
            )


def _listed(places: Iterable[str]) -> str:
    """The first few places, and how many there are besides."""
    places = list(places)
    left = len(places) - _MOST_PLACES
    return ", ".join(places[:_MOST_PLACES]) + (f" and {left} more" if left > 0 else "")


def _plan(layouts: Layouts) -> Section:
    problems = [*map(str, layouts.plan.problems), *filter(None, [layouts.problem])]
    if layouts.problem:
        problems.append("values, gradients and state are not compared")
    return Section("port plan", note="; ".join(problems), failed=bool(problems))
