"""One training step with AdamW and donated state, as a pure function of every form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import programs
from .forms import PURE
from .models import Case
from .row import Subject

OPTIMIZER = optax.adamw(1e-3)


def training(form: str, case: Case) -> tuple[Callable[..., Any], Any, Any]:
    """A step as a pure function of the trained state and the input, and both of them.

    Args:
      form: one of `PURE`.
      case: the model; all of its state is trained.
    """
    function, variables, x = PURE[form](case)
    leaves, treedef = jax.tree.flatten(variables)
    # Keys and counts of streams are not trained.
    is_trained = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def step(state: tuple[Any, Any, Any], x: Any) -> tuple[Any, Any]:
        trained, rest, opt_state = state

        def loss(trained: Any) -> Any:
            floats, others = iter(trained), iter(rest)
            merged = [next(floats if is_float else others) for is_float in is_trained]
            output = function(treedef.unflatten(merged), x)
            return jnp.mean(output.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(trained)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, trained)
        return value, (optax.apply_updates(trained, updates), rest, opt_state)

    # Donated, so the arrays are to be its own.
    copies = [jnp.copy(leaf) for leaf in leaves]
    trained = [leaf for leaf, is_float in zip(copies, is_trained, strict=True) if is_float]
    rest = [leaf for leaf, is_float in zip(copies, is_trained, strict=True) if not is_float]
    return step, (trained, rest, OPTIMIZER.init(trained)), x


def compiled_step(form: str, case: Case) -> Any:
    """The step compiled, its state donated."""
    step, state, x = training(form, case)
    return jax.jit(step, donate_argnums=0).lower(state, x).compile()


def training_step(form: str) -> Subject:
    """The compiled step, call after call."""

    def prepared(case: Case) -> Callable[[], Any]:
        step, state, x = training(form, case)
        compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
        held = [state]

        def call() -> Any:
            value, held[0] = compiled(held[0], x)
            return value

        return call

    return prepared


def step_bytes(form: str, case: Case) -> int:
    """The most memory that a compiled step holds, by XLA's own analysis."""
    return programs.peak_bytes(compiled_step(form, case))


def step_kernels(form: str, case: Case) -> int:
    """What a step launches one after the other: the instructions of its entry computation."""
    return programs.entry_instructions(compiled_step(form, case).as_text())


def of_forms(measured: Callable[[str, Case], Any]) -> dict[str, Subject]:
    """A figure of every form."""
    return {form: functools.partial(measured, form) for form in TRAINED}


TRAINED = ("NNX", "ToLinen", "flax ToLinen", "Linen", "ToNNX", "flax ToNNX")
