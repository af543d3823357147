"""Measures the subjects of a row in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long a row is measured.

    Attributes:
      rounds: how often every subject has its turn.
      turn: the seconds that a turn takes at least; short calls are repeated in it.
      processes: over how many processes the rounds are spread, one after the other. Where a process
        has its objects, and how it hashes strings, is for better or worse all its life.
      seconds: for how long each subject has its turns in all; where calls take long there are fewer
        rounds, but at least `LEAST_ROUNDS` in each process.
    """

    rounds: int
    turn: float
    processes: int = 1
    seconds: float = math.inf

    @property
    def of_one_process(self) -> Effort:
        """The part of each process."""
        rounds = math.ceil(self.rounds / self.processes)
        seconds = self.seconds / self.processes
        return dataclasses.replace(self, rounds=rounds, processes=1, seconds=seconds)

    def with_rounds(self, rounds: int | None) -> Effort:
        """The same with that many rounds, if they are told; a look takes no more than it does."""
        if rounds is None:
            return self
        return dataclasses.replace(self, rounds=min(rounds, self.rounds), seconds=math.inf)

    def rounds_of(self, turns: Sequence[float]) -> int:
        """How many rounds there are, if the subjects' turns take so many seconds."""
        fitting = self.seconds / max(statistics.mean(turns), 1e-7)
        return int(min(self.rounds, max(fitting, LEAST_ROUNDS)))


# Other programs on the machine's processor make it slower and faster by turns, every few tenths of
# a second. Turns of a round that are shorter than that are alike.
FULL = Effort(rounds=400, turn=0.005, processes=2, seconds=4.0)
QUICK = Effort(rounds=5, turn=0.005)
LEAST_ROUNDS = 10


def seconds(
    subjects: Mapping[str, Callable[[], Any]], effort: Effort, is_dispatch: bool = False
) -> dict[str, list[float]]:
    """The seconds per call of every subject in every round.

    The subjects take turns, and each round begins with another one. The garbage collector is off
    during a turn, as in `timeit`.

    Args:
      subjects: functions by name; what they return is waited for.
      effort: how long to measure.
      is_dispatch: whether a call is timed until it returns, each result being waited for with the
        clock stopped. Otherwise the last result of a turn is waited for in its time. Programs that
        are queued up behind each other take the time of computing, not that of dispatch.
    """
    turn = _dispatch_turn if is_dispatch else _turn
    once = {name: _once(call) for name, call in subjects.items()}
    repeats = {name: max(1, int(effort.turn / second)) for name, second in once.items()}
    found: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    gc.collect()
    for number in range(effort.rounds_of([repeats[name] * once[name] for name in names])):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            with _no_collection():
                found[name].append(turn(subjects[name], repeats[name]))
    return found


def _once(call: Callable[[], Any]) -> float:
    """The seconds of the third call; the first two compile and fill caches."""
    for _ in range(2):
        _turn(call, 1)
    return max(_turn(call, 1), 1e-7)


def _turn(call: Callable[[], Any], repeats: int) -> float:
    result = None
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def _dispatch_turn(call: Callable[[], Any], repeats: int) -> float:
    total = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        total += time.perf_counter() - start
        jax.block_until_ready(result)
    return total / repeats


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclasses.dataclass(frozen=True)
class Spread:
    """Some figures as their median, their quartiles and their least."""

    median: float
    low: float
    high: float
    least: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Summarises figures; of a single one all four are the same."""
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0], figures[0])
        low, median, high = statistics.quantiles(figures, n=4, method="inclusive")
        return cls(median, low, high, min(figures))


def ratio(of: Sequence[float], to: Sequence[float]) -> Spread:
    """The ratio of two subjects, round by round; `least` is that of the two least times."""
    rounds = Spread.of([a / b for a, b in zip(of, to, strict=True)])
    return dataclasses.replace(rounds, least=min(of) / min(to))
