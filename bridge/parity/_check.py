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

from bridge._errors import ConversionError, InvalidRngsError, ParityError

from . import _sections, _training
from ._divergence import compare_layers
from ._layouts import layouts_of
from ._models import EVALUATION, TRAINING_MODES, UPDATING, Model, Observing, Request, model_of
from ._numbers import table_of
from ._options import Options, chosen_sections
from ._programs import ModelProgram
from ._recorder import Trace, trace
from ._report import SECTIONS, Report, Section
from ._sections import Sides, has_state
from ._training import projection

_P = ParamSpec("_P")
CheckedModel: TypeAlias = nnx.Module | tuple[nn.Module, Mapping[Any, Any]]


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
    chosen = chosen_sections(sections, options, gradients=gradients)
    own = [{**(kwargs or {}), **extra} for extra in (options.a_kwargs, options.b_kwargs)]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((inputs, own))):
        raise ConversionError("parity.check expected arrays, found shapes: both models run")
    models = model_of(a, "a"), model_of(b, "b")
    modes = TRAINING_MODES if train else EVALUATION

    def requests(modes: Mapping[str, Any]) -> tuple[Request, Request]:
        axes = dict(options.axis_sizes)
        first, second = (Request(inputs, kwargs, method, rngs, modes, axes) for kwargs in own)
        return first, second

    given = requests(modes)
    is_told = any(m.names_mode(r) for m, r in zip(models, given, strict=True))
    updating = requests(modes if train or is_told else UPDATING)
    is_observed = bool(chosen & {"layers", "fields"})
    loss = options.loss or projection
    first, second = (
        ModelProgram(model, request, update, loss, _wanted(chosen, model, is_observed))
        for model, request, update in zip(models, given, updating, strict=True)
    )
    layouts, table = layouts_of(*models, rules), table_of(options.tolerances)
    sides = Sides(models, (first, second), layouts, table, options.dtypes)
    traces = _run(sides, given, jit=options.jit, is_observed=is_observed)
    layers = compare_layers(traces, layouts, table, dtypes=options.dtypes) if traces else None
    outputs = [t.output for t in traces] or [p.first().output for p in sides.programs]
    optimizer = options.optimizer or optax.sgd(1e-2, momentum=0.9)
    makers: Mapping[str, Callable[[], Section]] = {
        "port plan": lambda: _sections.port_plan(layouts),
        "weights": lambda: _sections.weights(sides),
        "outputs": lambda: _sections.outputs(sides, *outputs),
        "layers": lambda: _sections.layers(layers, traces),
        "fields": lambda: _sections.fields(layers, is_advisory=sections is None),
        "gradients": lambda: _training.gradients(sides),
        "state": lambda: _sections.state(sides),
        "steps": lambda: _training.steps(sides, options.steps, optimizer),
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


def _run(sides: Sides, requests: Sequence[Request], *, jit: bool, is_observed: bool) -> list[Trace]:
    """Runs both models; what is compiled is compiled while layers are observed."""
    traces: list[Trace] = []
    with ThreadPoolExecutor(2) as pool:
        for program in sides.programs:
            if jit and program.wanted:
                program.start(pool)
        if is_observed:
            traces = [_traced(*side) for side in zip(sides.models, requests, strict=True)]
        for program in sides.programs:
            program.first()
    return traces


def _traced(model: Model, request: Request) -> Trace:
    def run(observing: Observing) -> Any:
        return model.run(model.values, dataclasses.replace(request, observing=observing))[0]

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
