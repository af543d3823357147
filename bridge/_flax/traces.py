"""Which JAX trace a value belongs to, and programs of which only a part is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from flax import core
from jax.core import Tracer

from .promises import holds

_UNBOUND = re.compile(r"unbound axis name:? *'?([^\s'.]+)")


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says is not bound, None for another error.

    JAX tells which axes are bound, and not which a program asks for before it runs. Its message is
    all that there is: the error has no field, and the name may be a literal in the model's code. If
    JAX words it otherwise, the caller passes JAX's own error on.
    """
    found = _UNBOUND.search(str(error))
    return found[1] if found else None


def trace_of(value: Any) -> Any:
    """The trace that a value belongs to, None if it is a number.

    Without the private attribute all tracers seem to be of one trace, so that a definition which
    holds one of an outer trace is refused.
    """
    if not isinstance(value, Tracer):
        return None
    return value._trace if _HAS_TRACES else Tracer


def _has_traces() -> bool:
    """A tracer knows its trace, and all tracers of one program have the same."""
    found: list[Any] = []
    jax.make_jaxpr(lambda x, y: found.extend((x._trace, y._trace)))(0, 0)
    return found[0] is found[1] is not None


_HAS_TRACES = holds("jax.core.Tracer._trace", _has_traces, "taking every tracer for one of its own")


def partially_evaluate(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> Any:
    """Runs only what does not depend on the abstract inputs, as Linen's own `lazy_init` does.

    `flax.core.lazy_init` returns variables alone, so the output is passed as one.

    Raises:
      LazyInitError: a part of the output depends on an input.
    """
    trees: list[Any] = []

    def run(scope: core.Scope, *inputs: Any) -> None:
        leaves, tree = jax.tree.flatten(function(*inputs))
        trees.append(tree)
        scope.put_variable("output", "leaves", leaves)

    leaves = core.lazy_init(run)({}, *inputs)["output"]["leaves"]
    return jax.tree.unflatten(trees[-1], leaves)
