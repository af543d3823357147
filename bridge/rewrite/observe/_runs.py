"""Runs a Linen model under a `Watch`: `init`, and a step of a model that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from bridge._errors import BridgeError
from bridge.rewrite._failures import RewriteError, said

from ._entries import Entry
from ._snapshots import is_array
from ._steps import COLLECTION, choices, step
from ._trace import Watch


def run_entry(watch: Watch, entry: Entry) -> int:
    """Runs an entry with the arguments that were given.

    Raises RewriteError if the model raises.
    """
    try:
        return run(watch, entry.make(), *entry.called)
    except BridgeError:
        raise
    except Exception as error:
        raise RewriteError(
            "the model cannot be run with its sample inputs",
            [said(error)],
            "Give the inputs and keyword arguments that its call takes.",
        ) from error


def run(
    watch: Watch,
    module: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any],
    method: str | None = None,
) -> int:
    """Runs `init` under `jax.eval_shape`, and returns the number of the run."""

    def init(*arrays: Any) -> Any:
        given = iter(arrays)
        args, named = jax.tree.map(
            lambda leaf: next(given) if is_array(leaf) else leaf, (tuple(inputs), dict(kwargs))
        )
        function = getattr(type(module), method) if method else None
        keys = {name: jax.random.key(0) for name in ("params", "dropout")}
        with watch.running():
            return module.init(keys, *args, method=function, **named)

    leaves = [leaf for leaf in jax.tree.leaves((tuple(inputs), dict(kwargs))) if is_array(leaf)]
    variables = jax.eval_shape(init, *leaves)
    watch.records.variables.append(variables)
    number = len(watch.records.variables) - 1
    if COLLECTION in variables:
        _step(watch, number, module, (inputs, kwargs, method))
    return number


def _step(watch: Watch, run: int, module: nn.Module, called: Any) -> None:
    """Runs a step of a model that decodes, to see the lines that `init` does not run."""
    inputs, kwargs, method = called
    variables = watch.records.variables[run]
    function = getattr(type(module), method) if method else None
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}

    def apply(variables: Any, arrays: Any) -> Any:
        options = {"rngs": keys, "method": function, "mutable": list(variables)}
        args, named = arrays
        return module.apply(variables, *args, **options, **named)

    for cut in choices(inputs, kwargs):
        given, tree = jax.tree.flatten(step(inputs, kwargs, cut))
        arrays = [leaf for leaf in given if is_array(leaf)]

        def traced(variables: Any, arrays: Any, given: Any = given, tree: Any = tree) -> Any:
            own = iter(arrays)
            filled = [next(own) if is_array(leaf) else leaf for leaf in given]
            with watch.running(keeps=False):
                return apply(variables, jax.tree.unflatten(tree, filled))

        try:
            jax.eval_shape(traced, variables, arrays)
        except Exception:
            # Other arguments are the sequences.
            continue
        watch.records.steps[run] = cut
        return
