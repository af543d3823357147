"""Every form of a model as a pure function and its arguments, and what may be measured of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .models import Case
from .row import Ratio, Subject


def _linen(case: Case) -> tuple[Any, ...]:
    return case.linen.apply, case.variables, case.x


def _to_linen(case: Case) -> tuple[Any, ...]:
    return case.to_linen.apply, case.to_linen_variables, case.x


def _flax_to_linen(case: Case) -> tuple[Any, ...]:
    return case.flax_to_linen.apply, case.flax_to_linen_variables, case.x


def _merging(graphdef: Any, state: Any, x: Any) -> tuple[Any, ...]:
    return (lambda state, x: nnx.merge(graphdef, state)(x)), state, x


def _nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*case.nnx_split, case.x)


def _to_nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*nnx.split(case.to_nnx), case.x)


def _flax_to_nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*nnx.split(case.flax_to_nnx), case.x)


PURE: Mapping[str, Subject] = {
    "NNX": _nnx,
    "ToLinen": _to_linen,
    "flax ToLinen": _flax_to_linen,
    "Linen": _linen,
    "ToNNX": _to_nnx,
    "flax ToNNX": _flax_to_nnx,
}


def each(measured: Callable[..., Any]) -> dict[str, Subject]:
    """`measured(function, *arguments)` of every form of the model."""
    return {name: lambda case, pure=pure: measured(*pure(case)) for name, pure in PURE.items()}


def calling(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call with these arguments."""
    return lambda: function(*args)


def lowering(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Trace and lowering of a function."""
    # A new function each time, or JAX would remember the first trace.
    return lambda: jax.jit(functools.partial(function)).lower(*args)


def dispatching(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call of the compiled function."""
    return calling(jax.jit(function), *args)


def both(at_most: float | None, since: int = 1) -> tuple[Ratio, ...]:
    """Either wrapper over what it wraps, and Flax's own beside it."""
    return (
        Ratio("ToLinen", "NNX", at_most, since),
        Ratio("flax ToLinen", "NNX"),
        Ratio("ToNNX", "Linen", at_most, since),
        Ratio("flax ToNNX", "Linen"),
    )


def call_module(form: str) -> Subject:
    """An eager call of the module itself, which need not be merged first."""
    return lambda case: calling(getattr(case, form), case.x)


def _first_bias(variables: Any) -> Any:
    return variables["params"]["block_0"]["up"]["bias"]


def dispatch_variables(form: str) -> Subject:
    """Dispatch alone: the compiled program hands back one of its arguments."""
    return lambda case: dispatching(_first_bias, getattr(case, form))


def without_nnx(case: Case) -> Callable[[], Any]:
    """The same without the definition."""
    variables = {k: v for k, v in case.to_linen_variables.items() if k != "nnx"}
    return dispatching(_first_bias, variables)
