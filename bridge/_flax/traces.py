"""Runs the part of a program that needs no abstract input, and finds the inputs that matter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import numpy as np
from jax import api_util
from jax.core import Trace, Tracer, eval_context
from jax.extend.core import (
    Jaxpr,
    Primitive,
    TraceTag,
    jaxprs_in_params,
    set_current_trace,
    take_current_trace,
)
from jax.interpreters import partial_eval

from .promises import part, required

T = TypeVar("T")

# The block for what needs no abstract input of a partial evaluation. It runs as outside of one, as
# there JAX runs what it has compiled before without looking at it. If the block does need an input,
# JAX raises, and the evaluation starts again and stays inside.
WITHOUT_INPUTS: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar(
    "without_inputs", default=nullcontext
)

_JAX_TRACE: Any = part("jax._src.interpreters.partial_eval", "JaxprTrace")
_without_dead_code: Any = part("jax.interpreters.partial_eval", "dce_jaxpr")
_Base: Any = _JAX_TRACE if isinstance(_JAX_TRACE, type) else Trace


class _PartialTrace(_Base):
    """JAX's trace of a partial evaluation, without its unknown part.

    What is known is computed in the trace `parent`.
    """

    def __init__(self, parent: Trace):
        super().__init__(parent, (), TraceTag())
        # By id and unknown inputs: compiled programs, and whether all outputs are unknown.
        self._programs: dict[tuple[int, tuple[bool, ...]], tuple[Any, bool]] = {}

    def process_primitive(
        self, primitive: Primitive, tracers: Sequence[object], params: Mapping[str, Any], /
    ) -> Any:
        are_unknown = tuple([isinstance(x, Tracer) and x._trace is self for x in tracers])
        if any(params.get("donated_invars", ())):
            # What is known belongs to the model, and what replaces it may be unknown.
            params = {**params, "donated_invars": (False,) * len(tracers)}
        if not any(are_unknown):
            # JAX would make another program of a compiled one, and compile that.
            with set_current_trace(self.parent_trace):
                return primitive.bind(*tracers, **params)
        if primitive.name == "jit" and self._are_unknown(params["jaxpr"], are_unknown):
            # JAX would run the part of it that is known, for the other one.
            return list(map(self.unknown, params["jaxpr"].out_avals))
        return super().process_primitive(primitive, tracers, params)

    def unknown(self, aval: object) -> Any:
        """A value with only its shape and dtype known."""
        api: Any = partial_eval
        return api.JaxprTracer(self, api.PartialVal.unknown(aval), None)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Runs a block as outside of this evaluation, unless an inner transform runs it."""
        with take_current_trace() as current:
            outside = self.parent_trace if current is self else current
            with set_current_trace(outside):
                yield

    def _are_unknown(self, program: Jaxpr, inputs: tuple[bool, ...]) -> bool:
        key = id(program), inputs
        if key not in self._programs:
            self._programs[key] = program, all(_unknown_outputs(program, inputs))
        return self._programs[key][1]


# What calls a program with its own inputs, and the parameter with the program.
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def _unknown_outputs(program: Jaxpr, inputs: Iterable[bool]) -> list[bool]:
    """The outputs of a program that surely depend on an unknown input."""
    program = getattr(program, "jaxpr", program)
    unknown = {id(x) for x, is_unknown in zip(program.invars, inputs, strict=True) if is_unknown}
    for equation in program.eqns:
        are_unknown = [id(x) in unknown for x in equation.invars]
        if not any(are_unknown):
            continue
        outputs = equation.outvars
        if called := _CALLS.get(equation.primitive.name):
            of_call = _unknown_outputs(equation.params[called], are_unknown)
            outputs = itertools.compress(outputs, of_call)
        elif any(True for _ in jaxprs_in_params(equation.params)):
            # Of a loop, for instance.
            outputs = ()
        unknown.update(map(id, outputs))
    return [id(x) in unknown for x in program.outvars]


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def live_inputs(function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any]) -> set[str]:
    """The names of the inputs that the result of a function depends on.

    The function returns a tree of arrays and plain values; it is traced, not computed. An input
    that only reaches unused values does not count. If the result holds an object that JAX cannot
    look into, every input counts.
    """
    opaque: list[Any] = []

    def arrays(inputs: dict[str, Any]) -> list[jax.Array]:
        leaves = jax.tree.leaves(function(inputs))
        opaque.extend(leaf for leaf in leaves if not isinstance(leaf, (jax.Array, *_PLAIN)))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    jaxpr = jax.make_jaxpr(arrays)(dict(inputs)).jaxpr
    # JAX flattens a dict in the order of its keys.
    names = sorted(inputs)
    if opaque:
        return set(names)
    _, are_used = _without_dead_code(jaxpr, [True] * len(jaxpr.outvars))
    return set(itertools.compress(names, are_used))


def is_unknown(leaf: object) -> bool:
    """Whether a leaf of a program's output depends on its abstract inputs."""
    trace = leaf._trace if isinstance(leaf, Tracer) else None
    return type(trace) is _PartialTrace


def _evaluated(
    function: Callable[..., T], inputs: tuple[jax.ShapeDtypeStruct, ...], *, leaving: bool
) -> T:
    with take_current_trace() as parent:
        trace = _PartialTrace(parent)
        unknown = [trace.unknown(api_util.shaped_abstractify(aval)) for aval in inputs]
        token = WITHOUT_INPUTS.set(trace.left if leaving else nullcontext)
        try:
            with set_current_trace(trace):
                return function(*unknown)
        finally:
            WITHOUT_INPUTS.reset(token)


def _evaluates_partially() -> bool:
    """What no input reaches is computed; what one reaches is unknown."""

    def program(x: jax.Array) -> list[Any]:
        with WITHOUT_INPUTS.get()():
            # No array of JAX's: that would start a backend.
            made = np.arange(3)
        return [jax.jit(jax.lax.neg)(x), made, jax.lax.neg(x), *np.arange(3)]

    found = _evaluated(program, (jax.ShapeDtypeStruct((2,), np.float32),), leaving=True)
    return [is_unknown(x) for x in found] == [True, False, True, False, False, False]


@required("jax.interpreters.partial_eval.JaxprTrace", _evaluates_partially)
def partially_evaluate(function: Callable[..., T], *inputs: jax.ShapeDtypeStruct) -> T:
    """Runs only what does not depend on the abstract inputs; the rest is unknown in the output.

    Linen's `lazy_init` did so too, up to Flax 0.12.8. Since then it runs everything, with zeros for
    the abstract inputs, even if a variable depends on their values.
    """
    with take_current_trace() as current, eval_context(), take_current_trace() as outermost:
        is_outermost = current is outermost
    # A program around this would take an abstract input of it for a number.
    if is_outermost:
        with suppress(Exception):
            return _evaluated(function, inputs, leaving=True)
    return _evaluated(function, inputs, leaving=False)
