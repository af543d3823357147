"""The options of `check` that are rarely set, and the sections that all of them ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import optax

from bridge._errors import InvalidOptionsError, did_you_mean, listed, shown

from ._numbers import Tolerance
from ._report import SECTIONS


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


def chosen_sections(
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
