"""Finds where a JAX tracer comes from: its trace, and the equation or value that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import Tracer

from .promises import holds


class AnyEquation(Protocol):
    """An equation of a program, whether it is finished or being traced."""

    @property
    def primitive(self) -> Any: ...

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def invars(self) -> Sequence[Any]: ...

    @property
    def outvars(self) -> Sequence[Any]: ...


class Equation(NamedTuple):
    """An equation of a program that is being traced, as those of a finished one are."""

    primitive: Any
    params: Mapping[str, Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]


class _Unused(NamedTuple):
    """An output that nobody holds any more."""

    aval: Any


def trace_of(value: object) -> Any:
    """The trace that a value belongs to, None if it is a number."""
    if not isinstance(value, Tracer):
        return None
    return value._trace if _TELL_ORIGINS else Tracer


def made_by(tracer: Tracer[Any]) -> tuple[Equation, int] | None:
    """The equation that a tracer comes from and its place there, or None."""
    parent: Any = getattr(tracer, "parent", None)
    recipe: Any = getattr(tracer, "recipe", None)
    if not _TELL_ORIGINS:
        return None
    if parent is not None:
        equation = Equation(parent.primitive, parent.params, parent.in_tracers, parent.outvars)
        own = tracer.val
    elif hasattr(recipe, "out_tracer_refs"):
        # Of a program that is computed in part, as `nn.scan` looks for what is constant in it.
        pairs = zip(recipe.out_tracer_refs, recipe.out_avals, strict=True)
        outvars = [_Unused(aval) if ref() is None else ref() for ref, aval in pairs]
        equation = Equation(recipe.primitive, recipe.params, recipe.in_tracers, outvars)
        own = tracer
    else:
        return None
    return equation, next(i for i, var in enumerate(equation.outvars) if var is own)


def primal_of(tracer: object) -> Any:
    """The value that is differentiated, None for another tracer."""
    return getattr(tracer, "primal", None) if _TELL_ORIGINS else None


def batch_of(tracer: Any) -> tuple[Any, Any] | None:
    """The value for the whole batch and its axis there, None for what is not mapped over."""
    is_mapped = _TELL_ORIGINS and hasattr(tracer, "batch_dim")
    return (tracer.val, tracer.batch_dim) if is_mapped else None


def are_one(a: object, b: object) -> bool:
    """Whether two values are one; several tracers may stand for one variable of a program."""
    own = getattr(a, "val", None) if type(a) is type(b) else None
    return a is b or (own is not None and own is getattr(b, "val", None))


def _tell_origins() -> bool:
    """A tracer knows its trace, and the equation that it comes from with its inputs."""
    found: list[bool] = []

    def trace(x: Tracer[Any]) -> Any:
        made: Any = jax.lax.neg(x)
        equation, place = made_by(made) or (None, 0)
        is_told = equation is not None and are_one(equation.invars[0], x) and place == 0
        found.append(is_told and made._trace is x._trace is not None)
        return x

    jax.make_jaxpr(trace)(1.0)
    return found == [True]


# Until it is known: the check itself uses it.
_TELL_ORIGINS = True
_TELL_ORIGINS = holds(
    "what a JAX tracer comes from, its trace and its equation",
    _tell_origins,
    "comparing tracers by identity",
    "a call of nnx.jit or nnx.remat in a traced call counts as an update, and a definition"
    " that holds a value of an outer trace is refused",
)
