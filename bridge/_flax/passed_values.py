"""Recognises an array that programs have handed on unchanged.

`nnx.jit`, `nnx.remat`, `nnx.cached_partial` and `nnx.scan` return the whole state of a module, so
what nobody has changed comes back in new arrays, and as new tracers while a program is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .tracers import AnyEquation, are_one, batch_of, made_by, primal_of, trace_of

# Which input is handed on, and its axes in their new order: `jax.vmap` moves them. None stands for
# an axis along which it is repeated.
_Source: TypeAlias = "tuple[int, _Axes] | None"
_Axes: TypeAlias = "tuple[int | None, ...]"


class _Operand(Protocol):
    """An input or an output of an equation."""

    @property
    def aval(self) -> Any: ...


class PassedValues:
    """Compares arrays after a call with those before it; it looks at each program once."""

    def __init__(self) -> None:
        # By id; the programs are kept alive with what is known of them.
        self._passed: dict[int, tuple[Any, list[_Source]]] = {}

    def are_same(self, after: object, before: object) -> bool:
        """Whether two pytrees hold the same values, even if operations have passed them on.

        Gradients do not count: `stop_gradient` passes a value on.
        """
        if after is before:
            return True
        leaves, tree = jax.tree.flatten(after)
        leaves_before, tree_before = jax.tree.flatten(before)
        return tree == tree_before and all(map(self._is_same, leaves, leaves_before))

    def _is_same(self, after: object, before: object, axes: _Axes | None = None) -> bool:
        """Whether one array is the other one, with its axes in this order."""
        if after is before and axes is None:
            return True
        if not isinstance(after, jax.Array) or not isinstance(before, jax.Array):
            return False
        wanted = tuple(range(before.ndim)) if axes is None else axes
        after, order = self._origin(after)
        before, order_before = self._origin(before)
        wanted = _reordered(order_before, wanted)
        batch = batch_of(after)
        if batch and trace_of(after) is not trace_of(before):
            # What is the same for the whole batch has been repeated for it.
            return self._is_same(batch[0], before, _with_axis(wanted, batch[1]))
        if not isinstance(after, Tracer) and not isinstance(before, Tracer):
            return _is_equal(after, order, before, wanted)
        if order != wanted:
            return False
        if after is before:
            return True
        whole = batch_of(before)
        return self._is_same_batch(*batch, *whole) if batch and whole else are_one(after, before)

    def _is_same_batch(
        self, after: object, mine: object, before: jax.Array, theirs: object
    ) -> bool:
        """Whether two arrays with the batch axes `mine` and `theirs` are the same."""
        if not isinstance(mine, int) or not isinstance(theirs, int):
            return mine == theirs and self._is_same(after, before)
        axes = list(range(before.ndim))
        axes.insert(mine, axes.pop(theirs))
        return self._is_same(after, before, tuple(axes))

    def _origin(self, value: jax.Array) -> tuple[jax.Array, _Axes]:
        """The value that was handed on until it became this one, and the order of its axes."""
        axes: _Axes = tuple(range(value.ndim))
        while isinstance(value, Tracer):
            primal = primal_of(value)
            if primal is not None:
                value = primal
                continue
            made = made_by(value)
            if made is None:
                # A constant of the program stands for itself.
                return value.full_lower(), axes
            equation, place = made
            source = self._source(equation, place, self._are_same_cases)
            if source is None:
                break
            value = equation.invars[source[0]]
            axes = _reordered(source[1], axes)
        return value, axes

    def _are_same_cases(self, cases: Sequence[Any]) -> bool:
        (first, order), *others = map(self._origin, cases)
        return all(o == order and are_one(case, first) for case, o in others)

    def _source(
        self, equation: AnyEquation, place: int, are_same_cases: Callable[[Sequence[Any]], bool]
    ) -> _Source:
        """Which input an equation passes on as its output in this place, None if it computes it.

        `are_same_cases` says whether inputs are one value, so that it does not matter which is
        chosen.
        """
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self._of_program(params[_CALLS[name]])[place]
        if name in _HANDING_ON:
            return place, tuple(range(equation.outvars[place].aval.ndim))
        if name == "transpose":
            return place, params["permutation"]
        if name == "broadcast_in_dim":
            return _of_broadcast(equation)
        if name == "select_n":
            is_one = are_same_cases(equation.invars[1:])
            return (1, tuple(range(equation.outvars[0].aval.ndim))) if is_one else None
        rule = _RULES.get(name)
        return rule(self._of_program, equation, place) if rule else None

    def _of_program(self, program: object) -> list[_Source]:
        """For each output of a program, the input that it passes on, or None."""
        inner: Any = getattr(program, "jaxpr", program)
        if id(inner) in self._passed:
            return self._passed[id(inner)][1]
        # By id, as literals have no hash. What an equation does not hand on stays out.
        sources: dict[int, _Source] = {
            id(var): (i, tuple(range(getattr(var.aval, "ndim", 0))))
            for i, var in enumerate(inner.invars)
        }

        def are_same_cases(cases: Sequence[Any]) -> bool:
            first, *others = (sources.get(id(case)) for case in cases)
            return first is not None and all(other == first for other in others)

        for equation in inner.eqns:
            for place, var in enumerate(equation.outvars):
                source = self._source(equation, place, are_same_cases)
                given = source and sources.get(id(equation.invars[source[0]]))
                if source and given:
                    sources[id(var)] = given[0], _reordered(given[1], source[1])
        found = [sources.get(id(var)) for var in inner.outvars]
        self._passed[id(inner)] = inner, found
        return found


def _reordered(axes: _Axes, order: _Axes) -> _Axes:
    """The axes of a transposed array after another transposition."""
    return tuple(None if i is None else axes[i] for i in order)


def _with_axis(axes: _Axes, place: int) -> _Axes:
    """The axes of an array that is repeated along a new one."""
    return (*axes[:place], None, *axes[place:])


def _of_broadcast(equation: AnyEquation) -> _Source:
    """The input, unless an axis of its own is made longer."""
    given, made = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    axes: list[int | None] = [None] * len(made)
    for axis, place in enumerate(equation.params["broadcast_dimensions"]):
        axes[place] = axis
        if given[axis] != made[place]:
            return None
    return 0, tuple(axes)


def _of_scan(
    of_program: Callable[[Any], list[_Source]], equation: AnyEquation, place: int
) -> _Source:
    program = equation.params["jaxpr"]
    source = of_program(program)[place]
    if source is None:
        return None
    number, axes = source
    inner = getattr(program, "jaxpr", program)
    stacked = sum(map(_is_stacked, equation.invars, inner.invars))
    carried = len(inner.outvars) - sum(map(_is_stacked, equation.outvars, inner.outvars))
    constants = len(inner.invars) - stacked - carried
    if place < carried:
        return source if number == constants + place and _is_in_order(axes) else None
    # A slice that is stacked again where it was.
    moved = (0, *(None if axis is None else axis + 1 for axis in axes))
    return (number, moved) if number >= constants + carried else None


def _is_stacked(outer: _Operand, inner: _Operand) -> bool:
    return outer.aval.ndim != inner.aval.ndim


def _is_in_order(axes: _Axes) -> bool:
    return axes == tuple(range(len(axes)))


def _of_while(
    of_program: Callable[[Any], list[_Source]], equation: AnyEquation, place: int
) -> _Source:
    params = equation.params
    source = of_program(params["body_jaxpr"])[place]
    if source is None or source[0] != params["body_nconsts"] + place:
        return None
    return (source[0] + params["cond_nconsts"], source[1]) if _is_in_order(source[1]) else None


def _of_cond(
    of_program: Callable[[Any], list[_Source]], equation: AnyEquation, place: int
) -> _Source:
    source, *others = {of_program(branch)[place] for branch in equation.params["branches"]}
    # The first input says which branch is taken.
    return None if others or source is None else (source[0] + 1, source[1])


def _of_shards(
    of_program: Callable[[Any], list[_Source]], equation: AnyEquation, place: int
) -> _Source:
    params = equation.params
    source = of_program(params["jaxpr"])[place]
    if source is None or not _is_in_order(source[1]):
        return None
    return source if params["in_specs"][source[0]] == params["out_specs"][place] else None


# Where programs that run once are, by the name of the primitive.
_CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_HANDING_ON = frozenset(
    {"sharding_constraint", "copy", "copy_p", "optimization_barrier", "device_put", "reshard"}
    | {"stop_gradient"}
)
_RULES: Mapping[str, Callable[..., Any]] = {
    "scan": _of_scan,
    "while": _of_while,
    "cond": _of_cond,
    "shard_map": _of_shards,
}


# Bytes on the host take less time than a program, and more if they have to be fetched.
_SMALL = 1 << 14


def _is_equal(after: jax.Array, order: _Axes, before: jax.Array, wanted: _Axes) -> bool:
    """Whether two arrays hold the same with their axes in these orders, to the sign of a zero."""
    if isinstance(after, jax.Ref) or isinstance(before, jax.Ref) or before.is_deleted():
        return False
    # Outside of any program that is being traced.
    with jax.ensure_compile_time_eval():
        if len(order) != len(wanted):
            return False
        after, before = _arranged(after, order), _arranged(before, wanted)
        after, before = _repeated(after, order, before), _repeated(before, wanted, after)
        if (after.shape, after.dtype) != (before.shape, before.dtype):
            return False
        if jnp.issubdtype(after.dtype, jax.dtypes.prng_key):
            after, before = jax.random.key_data(after), jax.random.key_data(before)
        if after.is_fully_addressable and before.is_fully_addressable and after.nbytes < _SMALL:
            return np.asarray(after).tobytes() == np.asarray(before).tobytes()
        before = jax.device_put(before, after.sharding)
        is_inexact = jnp.issubdtype(after.dtype, jnp.inexact)
        is_same = jnp.array_equal(after, before, equal_nan=bool(is_inexact))
        if jnp.issubdtype(after.dtype, jnp.floating):
            is_same &= jnp.array_equal(jnp.signbit(after), jnp.signbit(before))
        return bool(is_same)


def _arranged(array: jax.Array, axes: _Axes) -> Any:
    """The array with its axes in this order, and of size 1 where it is to be repeated."""
    if _is_in_order(axes):
        return array
    own = [axis for axis in axes if axis is not None]
    return jnp.expand_dims(array.transpose(own), [i for i, a in enumerate(axes) if a is None])


def _repeated(array: jax.Array, axes: _Axes, like: jax.Array) -> Any:
    """The arranged array, as long as the other one where it is to be repeated."""
    if None not in axes:
        return array
    sizes = zip(axes, array.shape, like.shape, strict=True)
    return jnp.broadcast_to(array, [b if axis is None else a for axis, a, b in sizes])
