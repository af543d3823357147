"""What two models learn: gradients, and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from bridge._neutral import Address, Leaf, Neutral, nest

from ._layouts import Values, as_text, by_text
from ._models import Model, Request, is_of
from ._numbers import Compared, is_array, magnitude
from ._report import Section
from ._sections import NOT_COMPARED, Sides, leaves_of, values_of

# A gradient that is all rounding, as that of a bias below a norm, is small beside the others.
_FLOOR = 0.1
_SEED = 20240229


def gradients(
    sides: Sides, loss: Callable[[Any], Any], order: Mapping[tuple[str, ...], int]
) -> Section:
    """The gradients of a loss by parameter.

    Args:
      sides: the models.
      loss: output -> scalar.
      order: when `a`'s layers were called, by path; if forward passes agree, it tells where
        differences begin.
    """
    a, b = (
        _gradients(model, request, model.values, loss, sides.jit)[0]
        for model, request in zip(sides.models, sides.requests, strict=True)
    )
    floor = _FLOOR * max(map(magnitude, jax.tree.leaves(list(a.values()))), default=0.0)
    compared = tuple(sides.compare(a, b, floor))
    return Section("gradients", compared, _beginning(compared, sides, order))


def _beginning(
    compared: Iterable[Compared], sides: Sides, order: Mapping[tuple[str, ...], int]
) -> str:
    """Where a fault of the gradients alone shows first, as they come from the output."""
    called = {
        sides.layouts.place(address): max(order.get(path[:-1], -1) for _, path in sources)
        for address, sources in sides.layouts.sources.items()
        if sources
    }
    differing = [c.place for c in compared if not c.ok and called.get(c.place, -1) >= 0]
    if not differing:
        return ""
    latest = max(differing, key=lambda place: called[place])
    return f"from the output backwards, the first to differ is that of {latest}"


def steps(
    sides: Sides, loss: Callable[[Any], Any], count: int, optimizer: optax.GradientTransformation
) -> Section:
    """Parameters and state after each step of training, until one differs."""
    runs = [
        _training(model, request, loss, optimizer, sides.jit)
        for model, request in zip(sides.models, sides.requests, strict=True)
    ]
    compared: tuple[Compared, ...] = ()
    for step, (a, b) in enumerate(zip(*runs, strict=True)):
        if step == count:
            break
        floor = _FLOOR * max(map(magnitude, jax.tree.leaves(list(a.values()))))
        compared = tuple(sides.compare(a, b, floor))
        if not all(c.ok for c in compared):
            return Section("steps", compared, f"step {step + 1} of {count} is the first to differ")
    return Section("steps", compared, f"values after step {count}; those before it agree too")


def projection(output: Any) -> Any:
    """The default loss: the mean of every float output, each element with a random weight.

    Random weights, because a plain sum has the same gradient in many places, which would hide
    what is swapped.

    Args:
      output: what a model returned.
    """
    real = jax.dtypes.canonicalize_dtype(float)
    total = jnp.zeros((), real)
    for number, leaf in enumerate(leaves_of(output).values()):
        if is_array(leaf) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = jnp.promote_types(leaf.dtype, real)
            key = jax.random.fold_in(jax.random.key(_SEED), number)
            weight = jax.random.normal(key, leaf.shape, kind)
            total += jnp.mean(jnp.real(leaf.astype(kind) * weight)).astype(real)
    return total


def _gradients(
    model: Model, request: Request, values: Neutral, loss: Callable[[Any], Any], jit: bool
) -> tuple[Values, Neutral]:
    """The gradients by address, and the values after the call."""
    wanted = [x for x in values if is_of(x, nnx.Param) and _is_float(values[x].value)]
    others: list[tuple[Address, Leaf]] = []

    def objective(parameters: list[Any]) -> tuple[Any, list[Any]]:
        after = model.run(_with_values(values, dict(zip(wanted, parameters, strict=True))), request)
        others[:] = [(x, leaf) for x, leaf in after[1].items() if x not in wanted]
        kept = [jax.tree.map(lambda v: v, leaf.value) for _, leaf in others]
        return loss(after[0]), [v if _is_all_arrays(v) else None for v in kept]

    function = jax.grad(objective, has_aux=True)
    found, kept = (jax.jit(function) if jit else function)([values[x].value for x in wanted])
    after = {
        x: leaf if value is None else leaf._replace(value=value)
        for (x, leaf), value in zip(others, kept, strict=True)
    }
    return dict(zip(wanted, found, strict=True)), {**values, **after}


def _training(
    model: Model,
    request: Request,
    loss: Callable[[Any], Any],
    optimizer: optax.GradientTransformation,
    jit: bool,
) -> Iterator[Values]:
    """Parameters and state after each step, without end."""
    values = model.values
    memory = None
    while True:
        found, after = _gradients(model, request, values, loss, jit)
        parameters = _nested({x: values[x].value for x in found})
        memory = optimizer.init(parameters) if memory is None else memory
        updates, memory = optimizer.update(_nested(found), memory, parameters)
        new = optax.apply_updates(parameters, updates)
        values = _with_values(after, {x: _at(new, x) for x in found})
        yield values_of(values, *NOT_COMPARED)


def _nested(values: Values) -> dict[Any, Any]:
    """Values as the nested dicts that optimizers take, which sort their keys."""
    return nest({(c, *path): value for (c, path), value in by_text(values).items()})


def _at(nested: Any, address: Address) -> Any:
    collection, path = as_text(address)
    for key in (collection, *path):
        nested = nested[key]
    return nested


def _with_values(values: Neutral, changed: Values) -> Neutral:
    return {**values, **{x: values[x]._replace(value=value) for x, value in changed.items()}}


def _is_float(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves
    )


def _is_all_arrays(value: Any) -> bool:
    return all(map(is_array, jax.tree.leaves(value)))
