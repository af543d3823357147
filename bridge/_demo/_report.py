"""The report of the demo, as a JSON document and as a table."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from bridge._cli._output import Result, new_table
from bridge._demo import _migration

_HEADINGS = ("step", "what changed", "params", "max |diff|", "verdict", "accuracy", "seconds")


def result_of(report: _migration.MigrationReport) -> Result:
    """The result of the command; numbers that are not finite become null in its document."""
    document: dict[str, Any] = {**dataclasses.asdict(report), "held": report.held}
    for entry, step in zip(document["steps"], report.steps, strict=True):
        entry["held"] = step.held
        if step.max_abs_diff is not None and not math.isfinite(step.max_abs_diff):
            entry["max_abs_diff"] = None
    return Result("demo", document, _shown(report), report.held)


def _shown(report: _migration.MigrationReport) -> Iterator[Any]:
    yield (
        f"From Linen to NNX on {report.train_images} handwritten digits, data-parallel over"
        f" {report.devices} devices"
    )
    yield ""
    rows = [
        (
            f"{step.index} {step.name}",
            step.change,
            f"{step.parameters:,}",
            step.difference,
            step.verdict,
            step.accuracies,
            f"{step.seconds:.1f}",
        )
        for step in report.steps
    ]
    yield new_table(_HEADINGS, rows, right=_HEADINGS[2:])
    yield ""
    yield (
        f"max |diff|: logits of {report.held_out_images} held-out digits against the step before,"
        f" same weights; tolerance {report.tolerance:.0e}."
    )
    yield (
        f"accuracy: held-out, before and after training ({report.epochs} epochs at step 0, then"
        f" {report.training_steps} steps each); floor {report.floor:.0%}."
    )
    for step in report.steps:
        yield from (f"step {step.index} {step.name}: {problem}" for problem in step.problems)
    verdict = (
        "Every comparison held, and accuracy stayed above the floor."
        if report.held
        else "Not every check held."
    )
    yield f"{verdict} {report.seconds:.1f} s in all."
