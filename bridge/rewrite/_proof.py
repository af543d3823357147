"""Whether the new model does what the Linen model does, with the same random weights."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity, port
from bridge._errors import BridgeError

from ._build import Maker, importable
from ._entries import Entry, second_batch
from ._files import NewFile
from ._paths import rules_of
from ._plans import Program
from ._records import Instance
from ._weights import random_inputs, random_variables

MODE_NAMES = ("train", "training", "is_training", "deterministic", "use_running_average")


class ProofError(BridgeError, ValueError):
    """The weights of the Linen model do not fit the new one.

    Attributes:
        paths: the Linen paths of what does not fit, without collections.
    """

    def __init__(self, text: str, paths: Sequence[tuple[str, ...]]) -> None:
        self.paths = tuple(paths)
        super().__init__(text)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was compared.

    Attributes:
        reports: of `bridge.parity`, by what was run.
        rules: Linen paths to NNX paths, for `bridge.port`.
        sizes: the size arguments of each entry's model.
        first_place: the Linen path of the first layer that differs.
        notes: what was not compared.
    """

    reports: Mapping[str, parity.Report]
    rules: Mapping[str, str]
    sizes: Sequence[Mapping[str, Any]]
    first_place: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(report.ok for report in self.reports.values())

    @property
    def worst(self) -> float:
        """The largest difference of an output."""
        found = [0.0]
        for report in self.reports.values():
            for section in report.sections:
                if section.name == "outputs":
                    found += [c.max_abs for c in section.compared if c.max_abs is not None]  # pyright: ignore
        return max(found)


def prove(
    program: Program,
    entries: Sequence[Entry],
    files: Sequence[NewFile],
    texts: Mapping[str, tuple[str, str]],
    *,
    gradients: bool = True,
) -> Proof:
    """Runs both models on every entry.

    Args:
        program: everything.
        entries: how the model is made and called.
        files: the new files.
        texts: file and text by the new module's name.
        gradients: whether gradients are compared too.

    Raises:
        LeftLinenError: the new model cannot be made.
        ProofError: the weights do not fit.
    """
    reports: dict[str, parity.Report] = {}
    rules: dict[str, str] = {}
    sizes: list[Mapping[str, Any]] = []
    first: str | None = None
    notes: list[str] = []
    with importable(texts):
        modules = {f.module: importlib.import_module(f.name) for f in files}
        for run, given in enumerate(entries):
            entry = dataclasses.replace(given, kwargs=random_inputs(dict(given.kwargs)))
            maker = Maker(program, modules)
            root = program.records.instances[(run, ())]
            model = made(maker, root)
            sizes.append(maker.sizes(root))
            own = rules_of(program, run)
            rules.update(own)
            variables = random_variables(program.records.variables[run])
            inputs = random_inputs(entry.inputs)
            if _is_mixed(model):
                method = getattr(model, entry.method) if entry.method else model
                with warnings.catch_warnings():
                    # What is sown while variables are created is thrown away.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    bridge.lazy_init(method, *inputs, **entry.kwargs)
                nnx.pop(model, nnx.Intermediate)
            plan = port.plan(_without_sown(variables), model, own)
            if not plan.ok:
                problems = "; ".join(map(str, plan.problems[:3]))
                raise ProofError(
                    f"the weights do not fit the new model: {problems}", _linen_paths(plan)
                )
            plan.apply()
            label = "entry" if len(entries) == 1 else f"entry {run + 1}"
            linen = (entry.make(), _without_sown(variables))
            checker = _Checker(linen, model, own, entry, named_axes(program))
            report = checker.check(inputs, entry_kwargs(entry), gradients=gradients, jit=gradients)
            reports[label] = report
            if report.first_divergence is not None and first is None:
                first = "/".join(report.first_divergence.path)
            if not report.ok:
                continue
            larger = second_batch(inputs)
            if larger is not None:
                reports[f"{label}, another batch size"] = checker.check(
                    larger, entry_kwargs(entry), sections=["outputs"], jit=False
                )
            training = training_kwargs(entry)
            if training is None:
                continue
            if draws(program):
                notes.append(f"{label}: training was not compared, as dropout draws other masks")
            else:
                reports[f"{label}, in training"] = checker.check(
                    inputs, training, sections=["outputs", "state"], jit=False
                )
    return Proof(reports, rules, sizes, first, tuple(notes))


@dataclasses.dataclass(frozen=True)
class _Checker:
    """One pair of models under comparison."""

    linen: Any
    model: Any
    rules: Mapping[str, str]
    entry: Entry
    axes: Mapping[str, int]

    def check(self, inputs: Any, kwargs: Mapping[str, Any], **options: Any) -> parity.Report:
        """A report; NNX models are compared without the shardings that a mesh would give."""
        with nnx.use_eager_sharding(False):
            return parity.check(
                self.linen,
                self.model,
                *inputs,
                rules=self.rules,
                kwargs=kwargs,
                method=self.entry.method,
                axis_sizes=self.axes,
                **options,
            )


def named_axes(program: Program) -> dict[str, int]:
    """The named axes that layers reduce over, each with a single member."""
    found = [m.made.get("axis_name") for m in program.records.makings if m.kind == "module"]
    return {name: 1 for name in found if isinstance(name, str)}


def entry_kwargs(entry: Entry) -> dict[str, Any]:
    """The keyword arguments of an entry's call, with the defaults of modes written out.

    `parity.check` would set a mode that is not given on the Linen side alone.
    """
    return {
        **{name: p.default for name, p in _modes(entry).items() if isinstance(p.default, bool)},
        **entry.kwargs,
    }


def training_kwargs(entry: Entry) -> dict[str, Any] | None:
    """The same for training; None if the call has no mode, or is in training already."""
    given = entry_kwargs(entry)
    names = [name for name in _modes(entry) if name in given]
    training = {name: name in ("train", "training", "is_training") for name in names}
    if not names or all(given[name] == training[name] for name in names):
        return None
    return {**given, **training}


def _modes(entry: Entry) -> dict[str, inspect.Parameter]:
    function = getattr(type(entry.make()), entry.method or "__call__")
    parameters = inspect.signature(function).parameters
    return {name: parameters[name] for name in MODE_NAMES if name in parameters}


def draws(program: Program) -> bool:
    """Whether a model draws keys when it is in training."""
    for making in program.records.makings:
        if (
            making.kind == "make_rng"
            or (making.cls is nn.Dropout and making.made.get("rate"))
            or (
                making.cls is not None
                and making.kind == "module"
                and making.made.get("dropout_rate")
            )
        ):
            return True
    return False


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
    return {k: v for k, v in variables.items() if k not in ("intermediates", "perturbations")}


def as_arrays(inputs: Any) -> Any:
    """Zeros for shapes."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, inputs
    )
