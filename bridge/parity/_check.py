"""`check`: whether two models do the same, and the first layer that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from bridge._errors import InvalidRngsError, ParityError

from . import _sections, _training
from ._divergence import Layers, compare_layers
from ._layouts import Layouts, layouts_of
from ._models import EVALUATION, TRAINING, UPDATING, Model, Request, model_of
from ._numbers import Tolerance, table_of
from ._report import Report, Section
from ._sections import Sides
from ._trace import Trace, trace


def check(
    a: Any,
    b: Any,
    *inputs: Any,
    rules: Any = None,
    method: Callable[..., Any] | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    a_kwargs: Mapping[str, Any] | None = None,
    b_kwargs: Mapping[str, Any] | None = None,
    rngs: Mapping[str, Any] | None = None,
    train: bool = False,
    layers: bool = True,
    gradients: bool = True,
    loss: Callable[[Any], Any] | None = None,
    steps: int = 0,
    optimizer: optax.GradientTransformation | None = None,
    tolerances: Mapping[Any, float | Tolerance] | None = None,
    dtypes: bool = True,
    jit: bool = False,
) -> Report:
    """Compares two models with the same weights: what they return, and what they learn.

    The weights themselves, outputs, the output of every layer, gradients by parameter, updated
    state, optimizer steps and partition specs. Each model runs with its own library; neither is
    changed, and nothing is converted but `a`'s results, to be laid out as `b`'s are.

    By default nothing is random: both models run as after `eval()`. A Linen module's
    `deterministic`, `use_running_average` and `train` are set as `ToNNX` sets them, unless one of
    them is among the arguments: then the arguments alone count. Updated state is that of one more
    run, with running averages updated and dropout still off. With `train=True` all runs are
    training runs, and dropout is active. A mask is then the same on both sides only where Linen and
    NNX draw the same key: between a module and its wrapper, not between Linen and native NNX.

    Args:
      a: `(linen_module, variables)`, or an NNX module such as a `ToNNX`; the reference.
      b: the same.
      *inputs: the arguments of both models.
      rules: for `port.plan`, which says what belongs together where the paths of a Linen and an NNX
        model differ.
      method: what is called, a name or a function of the module; `__call__` by default.
      kwargs: keyword arguments of both models.
      a_kwargs: keyword arguments of `a` alone.
      b_kwargs: keyword arguments of `b` alone.
      rngs: keys by stream name, for Linen's `apply` and for the streams that an NNX model has; by
        default NNX models use their own and Linen models have none.
      train: whether the models run as in training.
      layers: whether the output of every layer is compared. It keeps them all in memory. A
        re-implementation that arrives at the same output in another way has other values on the
        way, and is compared without.
      gradients: whether gradients are compared.
      loss: output -> scalar, for gradients and steps. By default the mean of all float outputs,
        each element with a random weight.
      steps: how many optimizer steps are made on both sides.
      optimizer: for the steps; by default SGD with momentum. Adam divides each gradient by its own
        size, so that those which are nothing but rounding make steps as large as the others.
      tolerances: an `rtol` or a `Tolerance` by dtype, over the defaults; 0 asks for equal values,
        which two models that do the same operations do have.
      dtypes: whether another dtype is a difference where the values agree.
      jit: whether outputs, gradients and steps are compiled; layers are compared without.

    Returns:
      A report; `report.ok` says whether nothing differs, `str(report)` is a table.

    Raises:
      InvalidModuleError: `a` or `b` is not a model of one of these kinds.
      ConversionError: the variables are no Linen variables.
      InvalidRngsError: `rngs` is no dict of keys.
      NotInitializedError: a `ToNNX` has no variables yet.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import bridge
      >>> from bridge import parity
      >>> x = jnp.ones((2, 3))
      >>> module = nn.Dense(4)
      >>> variables = module.init(jax.random.key(0), x)
      >>> wrapped = bridge.ToNNX.from_variables(module, variables)
      >>> parity.check((module, variables), wrapped, x).ok
      True
      >>> wrapped.bias[...] += 1.0
      >>> parity.check((module, variables), wrapped, x).section("weights").differing[0].place
      'params/bias'
    """
    if rngs is not None and not isinstance(rngs, Mapping):
        raise InvalidRngsError(rngs, "parity.check")
    models = model_of(a, "a"), model_of(b, "b")
    modes = TRAINING if train else EVALUATION

    def requests(modes: Mapping[str, Any]) -> tuple[Request, Request]:
        own = [{**(kwargs or {}), **(extra or {})} for extra in (a_kwargs, b_kwargs)]
        first, second = (Request(inputs, given, method, rngs, modes) for given in own)
        return first, second

    layouts = layouts_of(*models, rules)
    table = table_of(tolerances)
    sides = Sides(models, requests(modes), layouts, table, dtypes, jit)
    is_told = any(m.names_mode(r) for m, r in zip(models, sides.requests, strict=True))
    updating = requests(modes if train or is_told else UPDATING)
    loss = loss or _training.projection
    sections = [_plan(layouts)] if layouts.plan is not None else []
    sections += [_sections.weights(sides), _sections.outputs(sides)]
    first, order = None, {}
    if layers:
        trace_a, trace_b = map(_traced, models, sides.requests)
        found = compare_layers(trace_a, trace_b, layouts, table)
        first = found.first
        if first is None:
            order = {call.path: number for number, call in enumerate(trace_a.calls)}
        sections.append(_layers(found, (trace_a, trace_b)))
    if gradients:
        sections.append(_training.gradients(sides, loss, order))
    sections.append(_sections.state(dataclasses.replace(sides, requests=updating)))
    if steps:
        chosen = optimizer or optax.sgd(1e-2, momentum=0.9)
        sections.append(_training.steps(sides, loss, steps, chosen))
    sections.append(_sections.partition_specs(sides))
    return Report(models[0].name, models[1].name, tuple(sections), first)


def assert_same(a: Any, b: Any, *inputs: Any, **options: Any) -> Report:
    """`check` for test suites: raises if anything differs.

    Args:
      a: as for `check`.
      b: as for `check`.
      *inputs: as for `check`.
      **options: as for `check`.

    Returns:
      The report.

    Raises:
      ParityError: something differs; an `AssertionError` whose message is the report's table, and
        whose `report` is the report.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from bridge import parity
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> parity.assert_same(model, nnx.clone(model), jnp.ones((2, 3))).ok
      True
    """
    report = check(a, b, *inputs, **options)
    if not report.ok:
        raise ParityError(report)
    return report


def _traced(model: Model, request: Request) -> Trace:
    def run(made: Callable[[Any], None]) -> None:
        model.run(model.values, dataclasses.replace(request, made=made))

    return trace(run)


def _layers(found: Layers, traces: Iterable[Trace]) -> Section:
    notes = [f"{name}: {t.note}" for name, t in zip("ab", traces, strict=True) if t.note]
    if any(found.unmatched):
        only = " and ".join(
            f"{count} of {name}" for count, name in zip(found.unmatched, "ab", strict=True)
        )
        notes.append(f"calls without a counterpart: {only}")
    if found.not_comparable:
        notes.append(f"{found.not_comparable} calls return arrays of other shapes")
    return Section("layers", found.compared, "; ".join(notes))


def _plan(layouts: Layouts) -> Section:
    problems = [*map(str, layouts.plan.problems), *filter(None, [layouts.problem])]
    if layouts.problem:
        problems.append("values, gradients and state are not compared")
    return Section("port plan", note="; ".join(problems), failed=bool(problems))
