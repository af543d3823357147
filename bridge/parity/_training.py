"""Compares what two models learn: gradients, and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict

from bridge._conversion.neutral import nest

from ._layouts import AddressedValues, by_text
from ._numbers import Compared, is_comparable, magnitude
from ._programs import ModelProgram, with_values
from ._report import Section
from ._sections import NOT_COMPARED, Sides, leaves_of, values_of

# A gradient that is all rounding, as that of a bias below a norm, is small beside the others.
_FLOOR = 0.1
_SEED = 20240229


def gradients(sides: Sides) -> Section:
    """The gradients of the loss by parameter."""
    a, b = (program.first().gradients for program in sides.programs)
    compared = tuple(sides.compare(a, b, _floor(a), nan_agrees=False))
    return Section("gradients", compared, "; ".join(p.note for p in sides.programs if p.note))


def _floor(values: AddressedValues) -> float:
    return _FLOOR * max(map(magnitude, jax.tree.leaves(list(values.values()))), default=0.0)


def steps(sides: Sides, count: int, optimizer: optax.GradientTransformation) -> Section:
    """Parameters and state after each step of training, until one differs."""
    runs = [training(program, optimizer) for program in sides.programs]
    compared: tuple[Compared, ...] = ()
    for step, (a, b) in enumerate(zip(*runs, strict=True), 1):
        compared = tuple(sides.compare(a, b, _floor(a), nan_agrees=False))
        if not all(c.ok for c in compared):
            return Section("steps", compared, f"step {step} of {count} is the first to differ")
        if step == count:
            break
    return Section("steps", compared, f"values after step {count}; those before it agree too")


def training(
    program: ModelProgram, optimizer: optax.GradientTransformation
) -> Iterator[AddressedValues]:
    """Parameters and state of a model after each step, without end."""
    values, results = program.model.values, program.first()
    memory = None
    while True:
        parameters = _nested({x: values[x].value for x in results.gradients})
        memory = optimizer.init(parameters) if memory is None else memory
        updates, memory = optimizer.update(_nested(results.gradients), memory, parameters)
        new = flatten_dict(optax.apply_updates(parameters, updates))
        changed = {(c, path): new[c, *map(str, path)] for c, path in results.gradients}
        values = with_values(results.after, changed)
        yield values_of(values, *NOT_COMPARED)
        results = program(values)


def projection(output: Any) -> Any:
    """The default loss: the mean of every float output, each element with a random weight.

    Random weights, because a plain sum has the same gradient in many places, which would hide
    what is swapped.
    """
    real = jax.dtypes.canonicalize_dtype(float)
    total = jnp.zeros((), real)
    for number, leaf in enumerate(leaves_of(output).values()):
        if is_comparable(leaf) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = jnp.promote_types(leaf.dtype, real)
            key = jax.random.fold_in(jax.random.key(_SEED), number)
            weight = jax.random.normal(key, leaf.shape, kind)
            total += jnp.mean(jnp.real(leaf.astype(kind) * weight)).astype(real)
    return total


def _nested(values: AddressedValues) -> dict[Any, Any]:
    """Values as the nested dicts that optimizers take, which sort their keys."""
    return nest({(c, *path): value for (c, path), value in by_text(values).items()})
