"""Calls of one model by several threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx

import bridge

from .forms import PURE
from .models import Case
from .row import Subject

THREADS = 8


def in_threads(prepared: Callable[[Case], Callable[[], Any]]) -> Subject:
    """32 calls by 8 threads."""

    def of_case(case: Case) -> Callable[[], Any]:
        call = prepared(case)
        pool = ThreadPoolExecutor(THREADS)

        def calls() -> Any:
            return list(pool.map(lambda _: jax.block_until_ready(call()), range(4 * THREADS)))

        return calls

    return of_case


def jitted(form: str) -> Callable[[Case], Callable[[], Any]]:
    """The model as a pure function, compiled."""

    def prepared(case: Case) -> Callable[[], Any]:
        function, *arguments = PURE[form](case)
        return functools.partial(jax.jit(function), *arguments)

    return prepared


def bound(case: Case) -> Callable[[], Any]:
    """The model bound by `jit_partial`."""
    call = bridge.jit_partial(lambda model, x: model(x), nnx.clone(case.to_nnx))
    return functools.partial(call, case.x)


THREADED: Mapping[str, Subject] = {
    "NNX": in_threads(lambda case: functools.partial(case.nnx, case.x)),
    "ToLinen": in_threads(
        lambda case: functools.partial(case.to_linen.apply, case.to_linen_variables, case.x)
    ),
    "Linen": in_threads(lambda case: functools.partial(case.linen.apply, case.variables, case.x)),
    "ToNNX": in_threads(lambda case: functools.partial(case.to_nnx, case.x)),
}
