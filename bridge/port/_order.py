"""Reads from traces the order in which two models use their leaves.

A trace tells it without running anything: the first equation of the jaxpr that computes with a
leaf. A cast or a transposition alone is no use, as some models cast all of their parameters first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from bridge._conversion import linen_leaves
from bridge._conversion.collections import STATIC
from bridge._errors import PortError

from ._trees import value_of
from ._uses import Order, order_of


def of_nnx(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
    """The order in which a call of an NNX model uses its Variables.

    The model may be abstract and is not changed. Inputs are arrays or shapes. Raises PortError if
    the call fails.
    """
    graphdef, state = nnx.split(model, graph=True)
    flat = list(nnx.to_flat_state(state))

    def call(values: Sequence[Any], *arguments: Any) -> Any:
        pairs = zip(flat, values, strict=True)
        new = [(path, leaf.replace(value)) for (path, leaf), value in pairs]
        made = nnx.merge(graphdef, nnx.from_flat_state(new))(*arguments, **kwargs)
        return [leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)]

    values = [_abstract(value_of(leaf)) for _, leaf in flat]
    return _first_uses("NNX", call, [path for path, _ in flat], values, inputs)


def of_linen(
    module: nn.Module | Callable[..., Any], variables: Mapping[str, Any], inputs: Sequence[Any]
) -> Order:
    """The order in which `apply` of a Linen model uses its variables.

    `module` may be a function of the variables and the inputs that applies it. Variables may be
    abstract; inputs are arrays or shapes. Raises PortError if the call fails.
    """
    neutral = linen_leaves.from_variables(variables)
    static = {STATIC: variables[STATIC]} if STATIC in variables else {}
    # An input without arrays is not an argument of a trace.
    moving = {address: leaf for address, leaf in neutral.items() if hasattr(leaf.value, "shape")}

    def call(values: Sequence[Any], *arguments: Any) -> Any:
        filled = dict(neutral)
        for (address, leaf), value in zip(moving.items(), values, strict=True):
            filled[address] = leaf._replace(value=value)
        built = {**linen_leaves.to_variables(filled), **static}
        if not isinstance(module, nn.Module):
            return module(built, *arguments)
        # Every stream that is not given is drawn from `params`.
        rngs = {"params": jax.random.key(0)}
        return module.apply(built, *arguments, rngs=rngs, mutable=True)[0]

    values = [_abstract(leaf.value) for leaf in moving.values()]
    return _first_uses("Linen", call, list(moving), values, inputs)


def _abstract(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else value


def _first_uses(
    which: str,
    call: Callable[..., Any],
    keys: Sequence[Any],
    values: Sequence[Any],
    inputs: Sequence[Any],
) -> Order:
    try:
        jaxpr = jax.make_jaxpr(call)(values, *inputs).jaxpr
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise PortError(
            f"the {which} model cannot be traced with these inputs",
            [f"{type(error).__name__}: {text}"],
            "Give the inputs of its __call__, or none; a Linen call with other arguments is"
            " linen=lambda variables, x: module.apply(variables, x, train=False).",
        ) from error
    leaves = [key for key, value in zip(keys, values, strict=True) for _ in jax.tree.leaves(value)]
    return order_of(jaxpr, leaves)
