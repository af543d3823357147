"""Takes the weights through every step, and measures what a migrating team would want to know."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bridge._demo import _digits, _steps, _weights

TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        index: the step's number, from 0.
        name: the step's short name.
        change: what the team changed.
        renames: path prefix in the step before to path prefix in this one.
        parameters: number of trainable scalars.
        max_abs_diff: largest difference between the logits of this step's model and those of the
            step before, on all held-out digits, with the same weights; None at the first step.
        untrained: weights and statistics, as `collection/path`, that training did not change.
        accuracy_before: share of held-out digits right before the training steps.
        accuracy_after: the same after them.
        seconds: wall time of the step, compilation included.
        problems: what did not hold, in words; empty if all did.
    """

    index: int
    name: str
    change: str
    renames: dict[str, str]
    parameters: int
    max_abs_diff: float | None
    untrained: list[str]
    accuracy_before: float
    accuracy_after: float
    seconds: float
    problems: list[str]

    @property
    def held(self) -> bool:
        """Whether every check of this step held."""
        return not self.problems

    @property
    def difference(self) -> str:
        """The largest difference as text."""
        return "-" if self.max_abs_diff is None else f"{self.max_abs_diff:.1e}"

    @property
    def accuracies(self) -> str:
        """The accuracy before and after training as text."""
        return f"{self.accuracy_before:.1%} -> {self.accuracy_after:.1%}"

    @property
    def verdict(self) -> str:
        """Whether every check of this step held, as text."""
        return "held" if self.held else "FAILED"


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """What the whole migration gave, and under which settings."""

    devices: int
    train_images: int
    held_out_images: int
    seed: int
    epochs: int
    training_steps: int
    tolerance: float
    floor: float
    steps: list[StepResult]
    seconds: float

    @property
    def held(self) -> bool:
        """Whether every check of every step held."""
        return all(step.held for step in self.steps)


def migrate(
    digits: _digits.Digits,
    steps: Sequence[_steps.Step],
    *,
    seed: int,
    epochs: int,
    training_steps: int,
    floor: float,
    tell: Callable[[str], None],
) -> MigrationReport:
    """Trains the first step's model from scratch, then takes its weights through the other steps.

    Args:
        digits: the digits and their mesh.
        steps: the steps; the first starts from its own initial values.
        seed: of initial values, batch order and dropout.
        epochs: how long the first model trains.
        training_steps: how many training steps each later model takes.
        floor: the held-out accuracy every trained model has to reach, in [0, 1].
        tell: is called with each line about the progress.

    Returns:
        The report; a check that does not hold is in it, and does not stop the migration.

    Raises:
        ValueError: when the renamed weights do not fit a step's model.
    """
    started = time.perf_counter()
    reached = _Reached({}, None)
    results: list[StepResult] = []
    for index, step in enumerate(steps):
        tell(f"step {index} {step.name}: {step.change}")
        for old, new in step.renames.items():
            tell(f"  {old} -> {new}")
        count = training_steps if index else epochs * digits.steps_per_epoch
        result, reached = _taken(digits, index, step, reached, seed + index, count)
        result = dataclasses.replace(result, problems=problems_of(result, floor))
        tell(f"  max |diff| {result.difference}, accuracy {result.accuracies}: {result.verdict}")
        results.append(result)
    return MigrationReport(
        devices=digits.mesh.size,
        train_images=len(digits.train_labels),
        held_out_images=len(digits.held_out_labels),
        seed=seed,
        epochs=epochs,
        training_steps=training_steps,
        tolerance=TOLERANCE,
        floor=floor,
        steps=results,
        seconds=time.perf_counter() - started,
    )


class _Reached(NamedTuple):
    """What one step leaves to the next: its weights, and its logits of the held-out digits."""

    weights: _weights.Weights
    logits: np.ndarray | None


def _taken(
    digits: _digits.Digits,
    index: int,
    step: _steps.Step,
    before: _Reached,
    seed: int,
    count: int,
) -> tuple[StepResult, _Reached]:
    """Takes one step, with `count` training steps; which problems it has is not yet said."""
    started = time.perf_counter()
    trainee = step.build(_weights.renamed(before.weights, step.renames), seed, digits.mesh)
    weights_before = trainee.weights()
    logits_before = np.asarray(trainee.logits(digits.held_out_images))
    trainee.fit(digits.batches(seed, count))
    weights = trainee.weights()
    logits_after = np.asarray(trainee.logits(digits.held_out_images))
    result = StepResult(
        index=index,
        name=step.name,
        change=step.change,
        renames=dict(step.renames),
        parameters=_weights.parameter_count(weights),
        max_abs_diff=_max_abs_diff(logits_before, before.logits),
        untrained=_untrained(weights_before, weights),
        accuracy_before=digits.accuracy(logits_before),
        accuracy_after=digits.accuracy(logits_after),
        seconds=time.perf_counter() - started,
        problems=[],
    )
    return result, _Reached(weights, logits_after)


def _max_abs_diff(logits: np.ndarray, reference: np.ndarray | None) -> float | None:
    return None if reference is None else float(np.max(np.abs(logits - reference)))


def _untrained(before: _weights.Weights, after: _weights.Weights) -> list[str]:
    return [key for key in sorted(before) if np.array_equal(before[key], after[key])]


def problems_of(result: StepResult, floor: float) -> list[str]:
    """Returns, in words, what does not hold in the measurements of `result`."""
    problems = []
    difference = result.max_abs_diff
    # NaN compares false with everything, so this form rejects it.
    if difference is not None and not difference <= TOLERANCE:
        problems.append(f"outputs differ from the step before by {difference:.1e}")
    if result.untrained:
        problems.append(f"training left unchanged: {', '.join(result.untrained)}")
    measured = [result.accuracy_after]
    if result.index:
        measured.append(result.accuracy_before)
    if min(measured) < floor:
        problems.append(f"accuracy {min(measured):.1%} is below the floor of {floor:.1%}")
    return problems
