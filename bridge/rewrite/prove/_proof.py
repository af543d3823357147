"""Compares the new model with the Linen model, with the same random weights."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from bridge import parity
from bridge.rewrite.emit._files import NewFile
from bridge.rewrite.observe._entries import (
    Entry,
    Varied,
    entry_kwargs,
    has_mode_field,
    second_batch,
    training_kwargs,
)
from bridge.rewrite.observe._snapshots import shapes_of
from bridge.rewrite.observe._steps import step
from bridge.rewrite.plan._plans import Program

from ._build import Maker, importable
from ._compare import Checker
from ._pairing import NoNumbersError, is_mixed, pair, without_sown
from ._proven import EntryError, Proof, ProofError
from ._same_program import Found
from ._weights import INTEGERS, has_integers, random_inputs

# What is still compared where both models are one program: layers and gradients follow from it.
_OF_ONE_PROGRAM = ("port plan", "weights", "outputs", "partition specs")
_OF_A_STEP = ("port plan", "weights", "outputs", "state", "partition specs")
NO_NUMBERS = "the Linen program returns no numbers"
_STEPS = 3
# The first step has no position but 0.
_OF_STEPS = (INTEGERS[1], INTEGERS[2])


def prove(
    program: Program,
    entries: Sequence[Entry],
    files: Sequence[NewFile],
    texts: Mapping[str, tuple[str, str]],
    varied: Sequence[Varied] = (),
    *,
    gradients: bool = True,
) -> Proof:
    """Runs both models on every entry.

    `texts` has file and text by the new module's name. `varied` has runs with other fields, or
    other sizes. Raises EntryError if the new model of an entry cannot be made, or the weights do
    not fit.
    """
    with importable(texts):
        modules = {f.module: importlib.import_module(f.name) for f in files}
        prover = Prover(program, Maker(program, modules), gradients=gradients)
        tops = [root.cls.__name__ for root in program.roots]
        for run, (top, entry) in enumerate(zip(tops, entries, strict=True)):
            number = "entry" if len(entries) == 1 else f"entry {run + 1}"
            try:
                prover.entry(run, entry, f"{top}, {number}" if len(set(tops)) > 1 else number)
            except Exception as error:
                raise EntryError(run, error) from error
        if all(report.ok for report in prover.reports.values()):
            for each in varied:
                prover.varied(each)
    return Proof(
        prover.reports,
        prover.rules,
        prover.sizes,
        prover.first,
        tuple(prover.notes),
        prover.place,
        tuple(prover.limits),
        tuple(prover.same),
    )


class Prover:
    """Runs both models, and keeps what was found."""

    def __init__(self, program: Program, maker: Maker, *, gradients: bool) -> None:
        self.program, self.maker, self.gradients = program, maker, gradients
        self.reports: dict[str, parity.Report] = {}
        self.rules: dict[type, dict[str, str]] = {}
        self.sizes: list[Mapping[str, Any]] = []
        self.notes: list[str] = []
        self.limits: list[str] = []
        self.same: list[str] = []
        self.first: str | None = None
        self.place = 0
        self._may_be_same = True

    def entry(self, run: int, given: Entry, label: str) -> None:
        """Compares everything on one entry."""
        self.sizes.append(self.maker.sizes(self.program.records.instances[(run, ())]))
        if run in self.program.records.steps:
            self._decoded(run, given, label)
            return
        checker, inputs = self._paired(run, given)
        self._keep_rules(run, checker)
        kwargs = entry_kwargs(checker.entry)
        is_trained = run not in self.program.records.untrained
        training = training_kwargs(checker.entry) if is_trained else None
        # A call without a mode may update state whenever it is mutable.
        state = training is None
        if self._is_same(checker, label, inputs, kwargs, state=state):
            options: dict[str, Any] = {"sections": _OF_ONE_PROGRAM}
        else:
            options = {"gradients": self.gradients, "jit": self.gradients}
        report = checker.check(inputs, kwargs, **options)
        self._keep(run, label, report)
        if not report.ok:
            return
        larger = second_batch((inputs, kwargs))
        name = f"{label}, another batch size"
        before = self._may_be_same
        if larger is not None and not self._is_same(checker, name, *larger, state=state):
            if checker.is_refused(*larger):
                # The Linen model takes one batch size alone, which says nothing about the other.
                self._may_be_same = before
            else:
                own = checker.check(*larger, sections=["outputs"])
                self._keep(run, name, own)
        name = f"{label}, in training"
        if training is not None and not self._is_same(checker, name, inputs, training, state=True):
            options = {"sections": ["outputs", "state"], "train": True}
            own = checker.check(inputs, training, **options)
            if not own.ok:
                # The layers tell which class it is.
                del options["sections"]
                own = checker.check(inputs, training, gradients=False, **options)
            self._keep(run, name, own)

    def _decoded(self, run: int, given: Entry, label: str) -> None:
        """Compares outputs and the cache in some steps of a model that decodes."""
        cut = self.program.records.steps[run]
        checker, inputs = self._paired(run, given, _OF_STEPS)
        if run < self.program.entries:
            self._keep_rules(run, checker)
        # A mode that the author fixed holds; otherwise Linen's attention would not drop.
        options = {"sections": _OF_A_STEP, "train": not has_mode_field(given)}
        for number in range(_STEPS):
            called, kwargs = step(inputs, entry_kwargs(checker.entry), cut, number)
            report = checker.check(called, kwargs, **options)
            self._keep(run, f"{label}, step {number + 1} of decoding", report)
            if not report.ok or number == _STEPS - 1:
                return
            checker = checker.advanced(called, kwargs)

    def _is_same(
        self, checker: Checker, label: str, inputs: Any, kwargs: Any, *, state: bool = False
    ) -> bool:
        """Whether both models are one program, which is noted."""
        if not self._may_be_same:
            return False
        return self._noted(checker.compared(inputs, kwargs, state=state), label)

    def _noted(self, found: Found, label: str) -> bool:
        # Tracing takes time as well: what differs on the entry differs elsewhere.
        self._may_be_same &= bool(found.same)
        if self._may_be_same:
            self.same.append(label)
        return self._may_be_same

    def varied(self, varied: Varied) -> None:
        """Compares outputs where a flag is another; the shapes of all where a size is."""
        label = f"with {varied.what}"
        try:
            if not varied.is_flag:
                kwargs = random_inputs(dict(varied.entry.kwargs))
                own = dataclasses.replace(varied.entry, kwargs=kwargs)
                self._abstract(varied.run, own, label)
            elif varied.run in self.program.records.steps:
                self._decoded(varied.run, varied.entry, label)
            else:
                self._flag(varied, label)
        except NoNumbersError:
            self.limits.append(f"{label} {NO_NUMBERS}")
        except ProofError as error:
            self.limits.append(f"{label} {error}")
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:120]
            self.limits.append(f"{label} the new program raised {type(error).__name__}: {text}")

    def _flag(self, varied: Varied, label: str) -> None:
        train = varied.is_training
        plan = self.program.plan_of(type(varied.entry.make()))
        # Where a field brings the mode along, no call of the class by itself is in training.
        has_mode = training_kwargs(varied.entry) is not None or (plan and plan.carried)
        state = train or not has_mode
        checker, inputs = self._pair(varied.run, varied.entry, INTEGERS[0])
        kwargs = entry_kwargs(checker.entry)
        if self.program.records.has_remat or self._may_be_same:
            found = checker.compared(inputs, kwargs, state=state)
            if not found.again:
                self.limits.append(f"{label} remat is around other parts")
            if self._noted(found, label):
                return
        first = checker, inputs
        checker, inputs = self._paired(varied.run, varied.entry, first=first)
        given = (inputs, entry_kwargs(checker.entry))
        sections = ["outputs", "state"] if state else ["outputs"]
        report = checker.check(*given, sections=sections, train=train)
        if not report.ok:
            report = checker.check(*given, gradients=False, train=train)
        self._keep(varied.run, label, report)

    def _pair(self, run: int, given: Entry, integers: tuple[int, int]) -> tuple[Checker, Any]:
        """Both models, and values for the inputs."""
        kwargs = random_inputs(dict(given.kwargs), integers)
        inputs = random_inputs(given.inputs, integers)
        entry = dataclasses.replace(given, kwargs=kwargs)
        return pair(self.program, self.maker, run, entry, inputs), inputs

    def _paired(
        self,
        run: int,
        given: Entry,
        integers: Sequence[tuple[int, int]] = INTEGERS,
        *,
        first: tuple[Checker, Any] | None = None,
    ) -> tuple[Checker, Any]:
        """Both models, and values under which the Linen model returns numbers.

        `integers` says what integers may be, in the order in which they are tried. `first` is what
        the first of these gives, if that is known already. Raises NoNumbersError if none were
        found, and the run is not one of the program's own.
        """
        cut, is_entry = self.program.records.steps.get(run), run < self.program.entries
        found = first
        for number, own in enumerate(integers):
            if number or found is None:
                found = self._pair(run, given, own)
            if is_entry and not has_integers((given.inputs, dict(given.kwargs))):
                return found
            checker, inputs = found
            called = inputs, entry_kwargs(checker.entry)
            if checker.is_finite(*(called if cut is None else step(*called, cut))):
                return found
        if is_entry and found is not None:
            return found
        raise NoNumbersError

    def _keep_rules(self, run: int, checker: Checker) -> None:
        """Notes the rules under the model's class: two models may have one path for two layers."""
        root = self.program.records.instances[(run, ())].cls
        self.rules.setdefault(root, {}).update(checker.rules)

    def _keep(self, run: int, label: str, report: parity.Report) -> None:
        self.reports[label] = report
        if not report.ok and self.first is None:
            found = report.first_divergence
            self.first = "/".join(found.path) if found is not None else None
            self.place = run

    def _abstract(self, run: int, entry: Entry, label: str) -> None:
        """Compares shapes alone: with other sizes a model may be too large to run."""
        root = self.program.records.instances[(run, ())]
        cut = self.program.records.steps.get(run)
        given, named = entry.inputs, entry.kwargs
        if cut is not None:
            given, named = step(given, named, cut)

        def whole(*inputs: Any) -> Any:
            model = self.maker.make(root, nnx.Rngs(0))
            if is_mixed(model):
                # Only `lazy_init` would make the variables of what stays Linen.
                return None
            method = getattr(model, entry.method) if entry.method else model
            state = nnx.state(model, nnx.All(nnx.Variable, nnx.Not(nnx.RngState)))
            return method(*inputs, **named), jax.tree.leaves(state)

        with nnx.use_eager_sharding(False):
            found = jax.eval_shape(whole, *given)
        if found is None:
            return
        output, leaves = found
        known = jax.tree.leaves(without_sown(self.program.records.variables[run]))
        before = [call.output for call in root.calls if call.method == (entry.method or "__call__")]
        # Some cells keep the kernels of all gates in one.
        if sum(each.size for each in leaves) != sum(each.size for each in known):
            self.limits.append(f"{label} the new program has other weights")
        elif cut is None and _shown(shapes_of(output)) != _shown(before[-1]):
            self.limits.append(f"{label} the new program returns other shapes")


def _shown(output: Any) -> str:
    """The leaves of an output: a class of the program's own may be shown by its address."""
    return repr(jax.tree.leaves(output))


def fault_in_place(
    program: Program,
    entries: Sequence[Entry],
    files: Sequence[NewFile],
    texts: Mapping[str, tuple[str, str]],
) -> str | None:
    """What is wrong with texts that take the place of the old files, None if nothing is.

    `texts` has path and text by the module's name.
    """
    try:
        # Only the import sees them: what makes the Linen model looks for it by the same names.
        with importable(texts):
            modules = {f.module: importlib.import_module(f.module) for f in files}
        prover = Prover(program, Maker(program, modules), gradients=False)
        for run, entry in enumerate(entries):
            prover.entry(run, entry, f"entry {run + 1}")
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return f"the new text raised {type(error).__name__}: {text}"
    wrong = [label for label, report in prover.reports.items() if not report.ok]
    return f"the new text differs: {wrong[0]}" if wrong else None
