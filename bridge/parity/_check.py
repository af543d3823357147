"""`check`: whether two models do the same, and the first layer that does not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeAlias

import jax
import optax
from flax import linen as nn
from flax import nnx

from bridge._errors import (
    ConversionError,
    InvalidOptionsError,
    InvalidRngsError,
    ParityError,
    did_you_mean,
    listed,
    shown,
)

from . import _sections
from ._divergence import compare_layers
from ._layouts import layouts_of
from ._models import EVALUATION, TRAINING_MODES, UPDATING, Model, Observing, Request, model_of
from ._numbers import Tolerance, compare, table_of
from ._programs import ModelProgram
from ._recorder import Trace, trace
from ._report import SECTIONS, Report, Section
from ._sections import Sides, has_state, projection

_P = ParamSpec("_P")
CheckedModel: TypeAlias = nnx.Module | tuple[nn.Module, Mapping[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `parity.check` that few programs need.

    Attributes:
      a_kwargs: keyword arguments only for `a`.
      b_kwargs: keyword arguments only for `b`.
      loss: output -> scalar, for gradients and steps. By default the mean of all float outputs,
        each element with a random weight.
      steps: how many optimizer steps are made on both sides; any adds the section `steps`.
      optimizer: for the steps; by default SGD with momentum. Adam is not suitable: it divides each
        gradient by its own size, so gradients that are only rounding errors make steps as large as
        others.
      tolerances: an `rtol` or a `Tolerance` by dtype, which replaces the default. 0 requires equal
        values, which two models with the same operations have.
      dtypes: whether another dtype counts as a difference where the values agree, also in the
        output of a layer.
      jit: whether gradients, updated state and steps are compiled, one program for each model.
        Layers, and the outputs with them, are run without compilation; if neither layers nor fields
        are compared, outputs come from the program. A model that JAX cannot trace is not compiled,
        and the report says so.
      axis_sizes: sizes of the named axes that the models reduce over, as
        `BatchNorm(axis_name='batch')` does. Every member of an axis gets the same inputs.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from bridge import parity
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> options = parity.Options(steps=3, tolerances={"float32": 0})
      >>> parity.check(model, nnx.clone(model), jnp.ones((2, 3)), options=options).ok
      True
    """

    a_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    b_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    steps: int = 0
    optimizer: optax.GradientTransformation | None = None
    tolerances: Mapping[Any, float | Tolerance] = dataclasses.field(default_factory=dict)
    dtypes: bool = True
    jit: bool = True
    axis_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def check(
    a: CheckedModel,
    b: CheckedModel,
    *inputs: object,
    rules: Mapping[str, str] | None = None,
    method: Callable[..., Any] | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rngs: Mapping[str, Any] | None = None,
    train: bool = False,
    gradients: bool = True,
    sections: Iterable[str] | None = None,
    options: Options | None = None,
) -> Report:
    """Compares two models with the same weights: outputs, layers, gradients and updates.

    It compares the weights themselves, outputs, the output of every layer, the static fields of the
    layers, gradients by parameter, updated state, optimizer steps and partition specs. Each model
    runs with its own library, and neither is changed. Only the results of `a` are converted to the
    layout of `b`. Static fields, such as a rate or an epsilon, are reported, but do not make the
    models differ unless `sections` names them. A dropout layer that only one model has is reported
    there too. Initialisers and unnamed functions are not compared.

    If a model raises an error, the error gets a note that names the model.

    By default nothing is random: both models run as after `eval()`. `deterministic`,
    `use_running_average` and `train` of a Linen module are set as `ToNNX` sets them; if you pass
    one of them, none is set. For the updated state there is one more run, which updates running
    averages with dropout still off. With `train=True` all runs are training runs, and dropout is
    active. Then a mask is the same on both sides only if both draw the same key: a module and its
    wrapper do, but Linen and native NNX do not.

    Args:
      a: `(linen_module, variables)`, or an NNX module such as a `ToNNX`; the reference.
      b: the same.
      *inputs: the arguments of both models.
      rules: for `port.plan`, which pairs the values if the paths of a Linen and an NNX model
        differ.
      method: the method to call, a name or a function of the module; `__call__` by default.
      kwargs: keyword arguments of both models.
      rngs: keys by stream name, for Linen's `apply` and for the streams that an NNX model has; by
        default NNX models use their own and Linen models have none.
      train: whether the models run as in training.
      gradients: whether gradients are compared, where `sections` does not say.
      sections: the sections to compare, names from `parity.SECTIONS`; by default all, but for
        steps, which `options` adds. The section `layers` keeps the output of
        every layer in memory; leave it out for a large model, and for a re-implementation that
        computes the same output with other intermediate values.
      options: further settings: steps, tolerances, compilation and more.

    Returns:
      A report; `report.ok` says whether nothing differs, `str(report)` is a table.

    Raises:
      InvalidModuleError: `a` or `b` is not a model of one of these kinds.
      ConversionError: the variables are not Linen variables, or inputs are shapes.
      InvalidRngsError: `rngs` is not a dict of keys.
      InvalidOptionsError: `sections` has an unknown name, a number is too small, or an option has
        no use; the error has every problem.
      MissingRngError: a Linen module draws a key that it was not given; the error names the layer,
        and says how to turn dropout off.
      UnboundAxisError: a model uses a named axis, and `axis_sizes` does not have it.
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
    options = Options() if options is None else options
    chosen = _chosen_sections(sections, options, gradients=gradients)
    modes = TRAINING_MODES if train else EVALUATION
    requests = [
        Request(inputs, {**(kwargs or {}), **own}, method, rngs, modes, dict(options.axis_sizes))
        for own in (options.a_kwargs, options.b_kwargs)
    ]
    arrays = jax.tree.leaves((inputs, [request.kwargs for request in requests]))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        raise ConversionError("parity.check expected arrays, found shapes: both models run")
    models = model_of(a, "a"), model_of(b, "b")
    is_told = any(m.names_mode(request) for m, request in zip(models, requests, strict=True))
    is_observed = bool(chosen & {"layers", "fields"})
    first, second = (
        ModelProgram(
            model,
            request,
            modes if train or is_told else UPDATING,
            options.loss or projection,
            _wanted(chosen, model, is_observed),
        )
        for model, request in zip(models, requests, strict=True)
    )
    table = table_of(options.tolerances)
    measure = functools.partial(compare, table=table, dtypes=options.dtypes)
    layouts = layouts_of(*models, rules)
    sides = Sides((first, second), layouts, measure)
    traces = _run(sides.programs, jit=options.jit, is_observed=is_observed)
    layers = compare_layers(traces, layouts, measure) if traces else None
    outputs = [t.output for t in traces] or [p.first().output for p in sides.programs]
    optimizer = options.optimizer or optax.sgd(1e-2, momentum=0.9)
    makers: Mapping[str, Callable[[], Section]] = {
        "port plan": lambda: _sections.port_plan(layouts),
        "weights": lambda: _sections.weights(sides),
        "outputs": lambda: _sections.outputs(sides, *outputs),
        "layers": lambda: _sections.layers(layers, traces),
        "fields": lambda: _sections.fields(layers, is_advisory=sections is None),
        "gradients": lambda: _sections.gradients(sides),
        "state": lambda: _sections.state(sides),
        "steps": lambda: _sections.steps(sides, options.steps, optimizer),
        "partition specs": lambda: _sections.partition_specs(sides),
    }
    made = [
        makers[name]()
        for name in SECTIONS
        if name in chosen and (name != "port plan" or layouts.plan is not None)
    ]
    return Report(
        models[0].name,
        models[1].name,
        tuple(made),
        layers and layers.first,
        layers and layers.inexact,
    )


def _chosen_sections(
    sections: Iterable[str] | None, options: Options, *, gradients: bool
) -> Set[str]:
    """The names of what is compared.

    `sections` has the names that the caller gave, and `gradients` counts if that is None. Raises
    InvalidOptionsError if a name is unknown, a number is too small, or an option has no use.
    """
    if not isinstance(options, Options):
        raise InvalidOptionsError([f"options: found {shown(options)}, expected a parity.Options"])
    steps = options.steps
    if sections is None:
        chosen = {*SECTIONS} - {"steps"} - (set() if gradients else {"gradients"})
    else:
        chosen = {sections} if isinstance(sections, str) else {*sections}
    problems: list[str] = []
    if unknown := sorted(map(str, chosen - {*SECTIONS})):
        hints = sorted({did_you_mean(name, SECTIONS) for name in unknown} - {""})
        found = f"sections: found {listed(unknown)}, expected some of {listed(SECTIONS)}"
        problems.append(". ".join([found, *hints]))
    if steps < 0:
        problems.append(f"steps: found {steps}, expected a number from 0 on")
    if ("steps" in chosen or options.optimizer is not None) and not steps:
        problems.append("sections, optimizer: say how many steps are made: steps=3")
    chosen |= {"steps"} if steps else set()
    if options.loss is not None and not chosen & {"gradients", "steps"}:
        problems.append("loss: neither gradients nor steps are compared")
    problems += [
        f"axis_sizes: found {size} for {name!r}, expected a number from 1 on"
        for name, size in options.axis_sizes.items()
        if size < 1
    ]
    if problems:
        raise InvalidOptionsError(problems)
    return chosen


def _run(programs: Sequence[ModelProgram], *, jit: bool, is_observed: bool) -> list[Trace]:
    """Runs both models; what is compiled is compiled while layers are observed."""
    traces: list[Trace] = []
    with ThreadPoolExecutor(2) as pool:
        for program in programs:
            if jit and program.wanted:
                program.start(pool)
        if is_observed:
            traces = [_traced(program) for program in programs]
        for program in programs:
            program.first()
    return traces


def _traced(program: ModelProgram) -> Trace:
    model = program.model

    def run(observing: Observing) -> Any:
        request = dataclasses.replace(program.request, observing=observing)
        return model.run(model.values, request)[0]

    return trace(run)


def _wanted(chosen: Set[str], model: Model, is_observed: bool) -> Set[str]:
    """What the program of a model computes for the chosen sections."""
    wanted = {
        # A model whose layers are observed gives its output there.
        "output": "outputs" in chosen and not is_observed,
        "gradients": chosen & {"gradients", "steps"},
        "after": "steps" in chosen,
        "state": "state" in chosen and has_state(model),
    }
    return {name for name, is_wanted in wanted.items() if is_wanted}


def _takes_arguments_of(
    function: Callable[_P, Report],
) -> Callable[[Callable[..., Report]], Callable[_P, Report]]:
    """Gives a function the signature of another one."""

    def declare(own: Callable[..., Report]) -> Callable[_P, Report]:
        return functools.wraps(function, assigned=(), updated=())(own)

    return declare


@_takes_arguments_of(check)
def assert_same(*args: Any, **kwargs: Any) -> Report:
    """`check` for test suites: raises if anything differs.

    Args:
      *args: as for `check`.
      **kwargs: as for `check`.

    Returns:
      The report.

    Raises:
      ParityError: something differs. It is an `AssertionError`; its message is the table of the
        report, and its field `report` is the report.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from bridge import parity
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> parity.assert_same(model, nnx.clone(model), jnp.ones((2, 3))).ok
      True
    """
    report = check(*args, **kwargs)
    if not report.ok:
        raise ParityError(report)
    return report
