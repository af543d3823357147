"""Whether the new model does what the Linen model does, with the same random weights."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bridge
from bridge import parity, port
from bridge._conversion.collections import OUTPUTS

from ._build import Maker, importable
from ._compare import Checker, draws, named_axes
from ._draws import streams, with_same_keys
from ._entries import Entry, Varied, entry_kwargs, second_batch, training_kwargs
from ._files import NewFile
from ._paths import rules_of
from ._plans import Program
from ._proven import Proof, ProofError
from ._records import Instance
from ._snapshots import shapes_of
from ._steps import step
from ._weights import has_integers, inexact, random_inputs, random_variables

# What is still compared where both models are one program: layers and gradients follow from it.
_OF_ONE_PROGRAM = ("port plan", "weights", "outputs", "partition specs")
_OF_A_STEP = ("port plan", "weights", "outputs", "state", "partition specs")
_STEPS = 3


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

    Args:
        program: everything.
        entries: how the model is made and called.
        files: the new files.
        texts: file and text by the new module's name.
        varied: runs with other fields, or other sizes.
        gradients: whether gradients are compared too.

    Raises:
        LeftLinenError: the new model cannot be made.
        ProofError: the weights do not fit.
    """
    with importable(texts):
        modules = {f.module: importlib.import_module(f.name) for f in files}
        prover = _Prover(program, Maker(program, modules), gradients=gradients)
        for run, entry in enumerate(entries):
            prover.entry(run, entry, "entry" if len(entries) == 1 else f"entry {run + 1}")
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


class _Prover:
    """Runs both models, and keeps what was found."""

    def __init__(self, program: Program, maker: Maker, *, gradients: bool) -> None:
        self.program, self.maker, self.gradients = program, maker, gradients
        self.reports: dict[str, parity.Report] = {}
        self.rules: dict[str, str] = {}
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
        entry, inputs = self._inputs(run, given)
        checker = self._pair(run, entry, inputs)
        self.rules.update(checker.rules)
        kwargs = entry_kwargs(entry)
        training = training_kwargs(entry)
        # A call without a mode may update state whenever it is mutable.
        state = training is None
        if self._is_same(checker, label, inputs, kwargs, state=state):
            options: dict[str, Any] = {"sections": _OF_ONE_PROGRAM, "jit": False}
        else:
            options = {"gradients": self.gradients, "jit": self.gradients}
        report = checker.check(inputs, kwargs, **options)
        self._keep(run, label, report)
        if not report.ok:
            return
        larger = second_batch(inputs)
        name = f"{label}, another batch size"
        if larger is not None and not self._is_same(checker, name, larger, kwargs, state=state):
            own = checker.check(larger, kwargs, sections=["outputs"], jit=False)
            self._keep(run, name, own)
        name = f"{label}, in training"
        if training is not None and not self._is_same(checker, name, inputs, training, state=True):
            options = {"sections": ["outputs", "state"], "jit": False, "train": True}
            own = checker.check(inputs, training, **options)
            self._keep(run, name, own)

    def _decoded(self, run: int, given: Entry, label: str) -> None:
        """Compares outputs and the cache in some steps of a model that decodes."""
        entry = dataclasses.replace(given, kwargs=random_inputs(dict(given.kwargs), ones=True))
        inputs = random_inputs(entry.inputs, ones=True)
        checker = self._pair(run, entry, inputs)
        self.rules.update(checker.rules)
        cut = self.program.records.steps[run]
        for number in range(_STEPS):
            called, kwargs = step(inputs, entry_kwargs(entry), cut, number)
            report = checker.check(called, kwargs, sections=_OF_A_STEP, jit=False)
            self._keep(run, f"{label}, step {number + 1} of decoding", report)
            if not report.ok:
                return
            checker = checker.advanced(called, kwargs)

    def _is_same(
        self, checker: Checker, label: str, inputs: Any, kwargs: Any, *, state: bool = False
    ) -> bool:
        """Whether both models are one program, which is noted."""
        found = self._may_be_same and checker.is_same(inputs, kwargs, state=state)
        # Tracing takes time as well: what differs on the entry differs elsewhere.
        self._may_be_same &= found
        if found:
            self.same.append(label)
        return found

    def varied(self, varied: Varied) -> None:
        """Compares outputs where a flag is another; the shapes of all where a size is."""
        label = f"with {varied.what}"
        entry = dataclasses.replace(varied.entry, kwargs=random_inputs(dict(varied.entry.kwargs)))
        try:
            if not varied.is_flag:
                self._abstract(varied.run, entry, label)
                return
            if varied.run in self.program.records.steps:
                self._decoded(varied.run, entry, label)
                return
            inputs = random_inputs(entry.inputs)
            checker = self._pair(varied.run, entry, inputs)
            given, train = (inputs, entry_kwargs(entry)), varied.is_training
            state = train or training_kwargs(entry) is None
            if self._is_same(checker, label, *given, state=state):
                return
            sections = ["outputs", "state"] if state else ["outputs"]
            report = checker.check(*given, sections=sections, jit=False, train=train)
            if not report.ok:
                report = checker.check(*given, gradients=False, jit=False, train=train)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:120]
            self.limits.append(f"{label} the new program raised {type(error).__name__}: {text}")
            return
        self._keep(varied.run, label, report)

    def _inputs(self, run: int, given: Entry) -> tuple[Entry, Any]:
        """Values under which the Linen model returns numbers, if any are found."""
        variables = _without_sown(random_variables(self.program.records.variables[run]))
        entry, inputs = given, ()
        for ones in (False, True):
            kwargs = random_inputs(dict(given.kwargs), ones=ones)
            entry = dataclasses.replace(given, kwargs=kwargs)
            inputs = random_inputs(entry.inputs, ones=ones)
            if ones or not has_integers((given.inputs, dict(given.kwargs))):
                break
            module = entry.make()
            output = module.apply(
                variables,
                *inputs,
                method=getattr(type(module), entry.method) if entry.method else None,
                mutable=list(variables),
                rngs=streams(self.program),
                **kwargs,
            )
            if all(jnp.isfinite(leaf).all() for leaf in inexact(output)):
                break
        return entry, inputs

    def _keep(self, run: int, label: str, report: parity.Report) -> None:
        self.reports[label] = report
        if not report.ok and self.first is None:
            found = report.first_divergence
            self.first = "/".join(found.path) if found is not None else None
            self.place = run

    def _pair(self, run: int, entry: Entry, inputs: Any) -> Checker:
        """Both models with the same random weights."""
        root = self.program.records.instances[(run, ())]
        model = made(self.maker, root)
        rules = rules_of(self.program, run)
        variables = _without_sown(random_variables(self.program.records.variables[run]))
        if _is_mixed(model):
            method = getattr(model, entry.method) if entry.method else model
            with warnings.catch_warnings():
                # What is sown while variables are created is thrown away.
                warnings.simplefilter("ignore", DeprecationWarning)
                bridge.lazy_init(method, *inputs, **entry.kwargs)
            nnx.pop(model, nnx.Intermediate)
        plan = port.plan(variables, model, rules)
        if not plan.ok:
            problems = "; ".join(map(str, plan.problems[:3]))
            raise ProofError(
                f"the weights do not fit the new model: {problems}", _linen_paths(plan)
            )
        plan.apply()
        with_same_keys(model)
        linen = (entry.make(), variables)
        keys = streams(self.program) if draws(self.program) else None
        return Checker(linen, model, rules, entry, named_axes(self.program), keys)

    def _abstract(self, run: int, entry: Entry, label: str) -> None:
        """Compares shapes alone: with other sizes a model may be too large to run."""
        root = self.program.records.instances[(run, ())]
        cut = self.program.records.steps.get(run)
        given, named = entry.inputs, entry.kwargs
        if cut is not None:
            given, named = step(given, named, cut)

        def whole(*inputs: Any) -> Any:
            model = self.maker.make(root, nnx.Rngs(0))
            method = getattr(model, entry.method) if entry.method else model
            state = nnx.state(model, nnx.Not(nnx.RngState))
            return method(*inputs, **named), jax.tree.leaves(state)

        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(lambda: self.maker.make(root, nnx.Rngs(0)))
            if _is_mixed(model):
                return
            output, leaves = jax.eval_shape(whole, *given)
        known = jax.tree.leaves(_without_sown(self.program.records.variables[run]))
        before = [call.output for call in root.calls if call.method == (entry.method or "__call__")]
        # Some cells keep the kernels of all gates in one.
        if sum(each.size for each in leaves) != sum(each.size for each in known):
            self.limits.append(f"{label} the new program has other weights")
        elif cut is None and repr(shapes_of(output)) != repr(before[-1]):
            self.limits.append(f"{label} the new program returns other shapes")


def made(maker: Maker, root: Instance) -> Any:
    """The new model, with zeros for the values that the Linen model's will replace.

    No initialiser runs, of which each shape would be compiled.
    """
    # Without a mesh NNX raises where it would shard an annotated value eagerly.
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: maker.make(root, nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def value(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))

    return nnx.merge(graphdef, jax.tree.map(value, state))


def _linen_paths(plan: port.Plan) -> list[tuple[str, ...]]:
    """The Linen sides of a plan's problems; a rule's is a regular expression without groups."""
    found = []
    for entry in plan.problems:
        for text in (*entry.source, *entry.target):
            parts = [part for part in text.split("/") if not any(c in part for c in "(\\.")]
            found.append(tuple(parts[1:] if parts[:1] in (["params"], ["batch_stats"]) else parts))
    return sorted(found, key=len, reverse=True)


def _is_mixed(model: Any) -> bool:
    return any(isinstance(node, bridge.ToNNX) for _, node in nnx.iter_graph(model))


def _without_sown(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in variables.items() if k not in OUTPUTS}
