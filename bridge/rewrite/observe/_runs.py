"""Runs a Linen model under a `Watch`: every entry, a step of one that decodes, other sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge._errors import BridgeError
from bridge.rewrite._failures import RewriteError, said

from ._entries import (
    Entry,
    Varied,
    combined,
    difference,
    is_flag,
    shaped,
    training_kwargs,
    variations,
)
from ._snapshots import is_array
from ._steps import COLLECTION, choices, step
from ._trace import Watch, WatchedLines


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


_SECONDS_FOR_VARIATIONS = 20.0
_MOST_VARIATIONS = 24


class Runs:
    """The runs, and what was seen in them.

    `watched` has the lines of a file before which something is recorded. `on_progress` is called
    with a line of text at each stage. `watch` is what was seen, `varied` has the runs with other
    sizes, and `notes` has remarks on the runs for the report.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        inside: Callable[[str], bool],
        watched: Callable[[str], WatchedLines],
        on_progress: Callable[[str], None],
    ) -> None:
        self.entries, self.on_progress = entries, on_progress
        self.watch = Watch(inside, watched)
        self.varied: list[Varied] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """Runs everything."""
        for number, entry in enumerate(self.entries):
            self.on_progress(f"tracing entry {number + 1}")
            run_entry(self.watch, shaped(entry))
        self._vary()

    def _vary(self) -> None:
        started = time.process_time()
        for index, entry in enumerate(self.entries):
            module = entry.make()
            training = training_kwargs(entry)
            if training is not None and self._traced(entry, None, entry.inputs, training) is None:
                self.notes.append("the model was not traced in training: it raised")
                self.watch.records.untrained.add(index)
            is_varied = False
            for apart in (True, False):
                together = combined(module, entry.inputs, apart=apart)
                run = None if together is None else self._traced(entry, *together, entry.kwargs)
                if together is not None and run is not None:
                    is_varied = True
                    self._keep(run, entry, *together, "other sizes")
                    break
            every = variations(module, entry.inputs, flags_alone=is_varied)
            for number, (changed, inputs) in enumerate(every):
                if time.process_time() - started > _SECONDS_FOR_VARIATIONS or (
                    number >= _MOST_VARIATIONS
                ):
                    self.notes.append("not all sizes were varied: it would have taken too long")
                    return
                self.on_progress(f"tracing with other sizes, {number + 1}")
                run = self._traced(entry, changed, inputs, entry.kwargs)
                if run is not None:
                    what = ", ".join(difference(module, changed)) or "other inputs"
                    self._keep(run, entry, changed, inputs, what)

    def _traced(self, entry: Entry, changed: Any, inputs: Any, kwargs: Any) -> int | None:
        """The number of a run, None if it raised."""
        try:
            return run(self.watch, changed or entry.make(), inputs, kwargs, entry.method)
        except Exception:
            return None

    def _keep(self, run: int, entry: Entry, changed: Any, inputs: Any, what: str) -> None:
        own = dataclasses.replace(entry, make=lambda: changed, inputs=inputs)
        self.varied.append(Varied(run, own, what, is_flag(what)))
