"""Which JAX trace a value belongs to, and programs of which only a part is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from flax.core import partial_eval
from jax.core import Tracer


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says is not bound, None for another error.

    JAX tells which axes are bound, and not which a program asks for before it runs.
    """
    found = re.search(r"unbound axis name: ?'?([^\s'.]+)", str(error))
    return found[1] if found else None


def trace_of(value: Any) -> Any:
    """The trace that a value belongs to, None if it is a number."""
    return value._trace if isinstance(value, Tracer) else None


def partially_evaluate(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> Any:
    """Runs only what does not depend on the abstract inputs, as Linen's own `lazy_init` does.

    `Module.lazy_init` does it for one Linen module, and a mixed model has no such method.
    """
    return partial_eval.lazy_init(function)(*inputs)
