"""The jaxprs inside of the equations of a jaxpr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex_core


def inner_jaxprs(equation: Any) -> Iterator[tuple[Any, int]]:
    """(jaxpr, operands that are not its inputs) of what an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(each, "jaxpr", each)
            if isinstance(sub, jex_core.Jaxpr):
                yield sub, max(len(equation.invars) - len(sub.invars), 0)
