"""The tree of the model that a TARGET names, made without allocating anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from bridge._cli._model import initialised
from bridge._cli._target import imported, sample_of

from ._nodes import Node
from ._observed import observing
from ._tree import module_tree


def tree(
    target: str,
    inputs: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    concrete: bool = False,
) -> Node:
    """Makes the model and looks at it.

    Args:
        target: `package.module:name` or `path/to/file.py:name`, see `_target`.
        inputs: sample inputs instead of those that come with the model.
        kwargs: keyword inputs beside those that come with the model.
        concrete: run it with real arrays instead of abstract ones.

    Raises:
        InputError: TARGET gives no model.
        ProgramError: making or running it raises.
    """
    with imported(target) as make:
        made: list[Node] = []

        def run() -> None:
            with observing() as observed:
                given = sample_of(make(), inputs, target, kwargs)
                model, variables = initialised(given, target)
                # Inside the trace, because traced values must not leave it.
                made.append(module_tree(model, observed, variables))

        if concrete:
            run()
        else:
            jax.eval_shape(run)
        return made[0]
