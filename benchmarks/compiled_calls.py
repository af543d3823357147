"""Compiled calls and gradient steps, of modules that keep their state and of pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import bridge

from .forms import PURE, calling, dispatching
from .models import Case
from .row import Ratio, Subject


def forward(model: Any, x: Any) -> Any:
    """A forward pass."""
    return model(x)


def _own(case: Case, form: str) -> Any:
    # A copy: `nnx.jit` rebuilds the modules it is given, and a step trains them.
    return nnx.clone(getattr(case, form))


def nnx_jit(function: Callable[..., Any], form: str) -> Subject:
    """A function under `nnx.jit`."""
    return lambda case: calling(nnx.jit(function), _own(case, form), case.x)


def _cached_partial(case: Case) -> Callable[[], Any]:
    return calling(nnx.cached_partial(nnx.jit(forward), _own(case, "to_nnx")), case.x)


def jit_partial(function: Callable[..., Any]) -> Subject:
    """A function of a `ToNNX` by `bridge.jit_partial`."""
    return lambda case: calling(bridge.jit_partial(function, _own(case, "to_nnx")), case.x)


def _flax_jit_partial(case: Case) -> Callable[[], Any]:
    own = _own(case, "to_nnx")
    jitted = nnx.jit_partial(forward, own, graph=True, graph_updates=False)
    return calling(jitted, case.x)


HOT_LOOPS: Mapping[str, Subject] = {
    "jax.jit of Linen": lambda case: dispatching(*PURE["Linen"](case)),
    "bridge.jit_partial": jit_partial(forward),
    "nnx.jit_partial": _flax_jit_partial,
    "nnx.cached_partial": _cached_partial,
    "nnx.jit": nnx_jit(forward, "to_nnx"),
}


def hot_loop(at_most: float | None = None, since: int = 1) -> tuple[Ratio, ...]:
    """The ways to compile a forward pass over the first one."""
    base, ours, *others = HOT_LOOPS
    return Ratio(ours, base, at_most, since), *(Ratio(other, base) for other in others)


# One step of gradient descent.

RATE = 1e-3


def pure_step(function: Callable[..., Any], variables: Any, x: Any) -> Callable[[], Any]:
    """A step on the parameters of a pure function."""
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def step(params: Any, rest: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(function({**rest, "params": params}, x) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    jitted = jax.jit(step)
    held = [variables["params"]]

    def call() -> Any:
        value, held[0] = jitted(held[0], rest, x)
        return value

    return call


def nnx_step(model: Any, x: Any) -> Any:
    """A step on a module that keeps its parameters."""

    def loss(model: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, gradient))
    return value
