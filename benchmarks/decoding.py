"""Decoding with a cache: in one program, and in a loop of Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .gpt import GPTShape, gpt
from .models import Case
from .row import Subject


def decoder(size: int) -> Case:
    """A small decoder with a cache for that many tokens."""
    return gpt(GPTShape(4, 64, 4, 256, size, decode=True))


def next_token(form: str, case: Case) -> tuple[Callable[..., Any], Any, Any]:
    """`(weights, cache, token, position) -> (token, cache)` of a form, its weights and first cache.

    The weights are an argument, as in a program that serves a model. One that closes over them has
    them as constants, so that every call has fewer arguments, and each model needs its own program.
    """
    if form in ("Linen", "ToLinen"):
        module, variables = {
            "Linen": lambda: (case.linen, case.variables),
            "ToLinen": lambda: (case.to_linen, case.to_linen_variables),
        }[form]()
        weights = {name: tree for name, tree in variables.items() if name != "cache"}

        def apply(weights: Any, cache: Any, token: Any, position: Any) -> Any:
            variables = {**weights, "cache": cache}
            logits, updates = module.apply(variables, token, position, mutable=["cache"])
            return chosen(logits), updates["cache"]

        return apply, weights, variables["cache"]
    model = case.nnx if form == "NNX" else case.to_nnx
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

    def call(weights: Any, cache: Any, token: Any, position: Any) -> Any:
        model = nnx.merge(graphdef, cache, weights)
        token = step_of(form)(model, token, position)
        return token, nnx.state(model, nnx.Cache)

    return call, rest, cache


def step_of(form: str) -> Callable[..., Any]:
    """One step of a module that keeps its cache."""
    options = {"mutable": ["cache"]} if form == "ToNNX" else {}
    return lambda model, token, position: chosen(model(token, position, **options))


def chosen(logits: Any) -> Any:
    """The likeliest token."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def decoding(form: str, case: Case) -> tuple[Callable[..., Any], Any, Any, Any]:
    """The whole sequence in one program: a function of weights, cache and first token, and them."""
    step, weights, cache = next_token(form, case)

    def run(weights: Any, cache: Any, token: Any) -> Any:
        def go_on(carry: Any) -> Any:
            return carry[0] < case.argument.length

        def body(carry: Any) -> Any:
            position, token, cache = carry
            token, cache = step(weights, cache, token, position)
            return position + 1, token, cache

        return jax.lax.while_loop(go_on, body, (jnp.int32(0), token, cache))[1]

    return run, weights, cache, case.x


def compiled_decoding(form: str) -> Subject:
    """The same, compiled."""

    def prepared(case: Case) -> Callable[[], Any]:
        run, *arguments = decoding(form, case)
        return functools.partial(jax.jit(run), *arguments)

    return prepared


def loop_of_jit(form: str) -> Subject:
    """A loop in Python around a jitted function of weights and cache."""

    def prepared(case: Case) -> Callable[[], Any]:
        step, weights, start = next_token(form, case)
        jitted = jax.jit(step)

        def call() -> Any:
            cache, token = start, case.x
            for position in range(case.argument.length):
                token, cache = jitted(weights, cache, token, position)
            return token

        return call

    return prepared


def loop_of_partial(form: str, make: Callable[..., Any]) -> Subject:
    """A loop in Python around a function with the model bound, which keeps its cache."""

    def prepared(case: Case) -> Callable[[], Any]:
        model = nnx.clone(case.nnx if form == "NNX" else case.to_nnx)
        bound = make(step_of(form), model)

        def call() -> Any:
            token = case.x
            for position in range(case.argument.length):
                token = bound(token, position)
            return token

        return call

    return prepared
