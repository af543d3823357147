"""The runs of a rewriting: of every entry, and of the model with other sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._entries import (
    Entry,
    Varied,
    branches,
    combined,
    difference,
    is_flag,
    shaped,
    training_kwargs,
    variations,
)
from ._runs import run, run_entry
from ._trace import Watch, WatchedLines

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
            every = variations
            for apart in (True, False):
                together = combined(module, entry.inputs, apart=apart)
                run = None if together is None else self._traced(entry, *together, entry.kwargs)
                if together is not None and run is not None:
                    every = branches
                    self._keep(run, entry, *together, "other sizes")
                    break
            for number, (changed, inputs) in enumerate(every(module, entry.inputs)):
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
