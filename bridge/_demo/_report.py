"""Shows the demo: a progress bar and one line per step on stderr, the rest on stdout."""

import dataclasses
import json
import math
import os
import types
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bridge._demo import _migration, _steps

_PIPED_WIDTH = 120


class Display:
    """A `Watcher` that draws a progress bar on stderr, so that stdout holds the result alone."""

    def __init__(self) -> None:
        """Makes the bar; entering the context shows it."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("training steps"),
            TimeElapsedColumn(),
            console=_console(stderr=True),
        )
        self._task = self._progress.add_task("loading digits", total=None)

    def __enter__(self) -> Self:
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Stops the bar, also after an error, so that the terminal's cursor comes back."""
        self._progress.stop()

    def begin(self, training_steps: int) -> None:
        """The migration will take so many training steps in all."""
        self._progress.update(self._task, total=training_steps)

    def enter(self, index: int, step: _steps.Step) -> None:
        """A step of the migration begins."""
        self._progress.update(self._task, description=f"step {index} {step.name}")
        self._print(f"step {index} {step.name}: {step.change}")
        for old, new in step.renames.items():
            self._print(f"  {old} -> {new}")

    def advance(self) -> None:
        """One training step is done."""
        self._progress.advance(self._task)

    def leave(self, result: _migration.StepResult) -> None:
        """A step of the migration is done."""
        self._print(
            f"  max |diff| {_difference(result)}, accuracy {_accuracies(result)}: "
            f"{_verdict(result)}"
        )

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False)


def print_table(report: _migration.MigrationReport) -> None:
    """Prints the closing table and the verdict on stdout."""
    console = _console()
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2,
        title=(
            f"From Linen to NNX on {report.train_images} handwritten digits, "
            f"data-parallel over {report.devices} devices"
        ),
        caption=(
            f"max |diff|: logits of {report.held_out_images} held-out digits against the step "
            f"before, same weights; tolerance {report.tolerance:.0e}. Accuracy: held-out, before "
            f"and after training ({report.epochs} epochs at step 0, then {report.training_steps} "
            f"steps each); floor {report.floor:.0%}."
        ),
    )
    table.add_column("step, what changed", ratio=1)
    for heading in ("params", "max |diff|", "verdict", "accuracy", "secs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in report.steps:
        table.add_row(
            f"{step.index} {step.name}: {step.change}",
            f"{step.parameters:,}",
            _difference(step),
            _verdict(step),
            _accuracies(step),
            f"{step.seconds:.1f}",
        )
    console.print(table)
    for step in report.steps:
        for problem in step.problems:
            console.print(f"step {step.index} {step.name}: {problem}", highlight=False)
    verdict = (
        "Every comparison held, and accuracy stayed above the floor."
        if report.held
        else "Not every check held."
    )
    console.print(f"{verdict} {report.seconds:.1f} s in all.", highlight=False)


def as_json(report: _migration.MigrationReport) -> str:
    """Returns the report as a JSON document; numbers that are not finite become null."""
    document: dict[str, Any] = dataclasses.asdict(report)
    document["held"] = report.held
    for entry, step in zip(document["steps"], report.steps, strict=True):
        entry["held"] = step.held
        if step.max_abs_diff is not None and not math.isfinite(step.max_abs_diff):
            entry["max_abs_diff"] = None
    return json.dumps(document, indent=2, allow_nan=False)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # Rich takes 80 columns for a pipe, which would break the table's cells over many lines.
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=stderr, width=_PIPED_WIDTH)


def _difference(result: _migration.StepResult) -> str:
    return "-" if result.max_abs_diff is None else f"{result.max_abs_diff:.1e}"


def _accuracies(result: _migration.StepResult) -> str:
    return f"{result.accuracy_before:.1%} -> {result.accuracy_after:.1%}"


def _verdict(result: _migration.StepResult) -> str:
    return "held" if result.held else "FAILED"
