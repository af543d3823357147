"""Keeps the results of a run as plain data: made by the rows, written as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax

from .all_rows import ROWS
from .measure import Effort, Spread, ratio, seconds
from .models import case_of
from .row import Ratio, Row, Size

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Found:
    """A ratio as it was found.

    Attributes:
      of: the subject above the line.
      to: the subject below it.
      found: the ratio, its spread over the rounds, and the ratio of the two least figures.
      target: what it should be at most, None if nothing is asked.
    """

    of: str
    to: str
    found: Spread
    target: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether the median is within the target, None without one."""
        return None if self.target is None else self.found.median <= self.target


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row at one size.

    Attributes:
      row: the row's name.
      unit: the row's unit.
      size: the size.
      subjects: every subject's figure.
      ratios: the row's ratios.
    """

    row: str
    unit: str
    size: Size
    subjects: dict[str, Spread]
    ratios: tuple[Found, ...]


def figures(row: Row, size: Size, effort: Effort) -> dict[str, list[float]]:
    """Every subject's figures at a size, measured in this process."""
    case = (row.case or case_of)(size)
    subjects = row.subjects_at(size)
    if row.unit == "s":
        calls = {name: subject(case) for name, subject in subjects.items()}
        return seconds(calls, effort, row.is_dispatch)
    return {name: [float(subject(case))] for name, subject in subjects.items()}


def _figures_of(name: str, size: Size, effort: Effort) -> dict[str, list[float]]:
    """The same of a row by its name, as a row cannot be sent to a process."""
    return figures(next(row for row in ROWS if row.name == name), size, effort)


def _measured_as(row: Row, size: Size, figures: dict[str, list[float]]) -> Measured:
    return Measured(
        row.name,
        row.unit,
        size,
        {name: Spread.of(figure) for name, figure in figures.items()},
        tuple(
            _found(wanted, size, figures)
            for wanted in row.ratios
            if {wanted.of, wanted.to} <= figures.keys()
        ),
    )


def _found(wanted: Ratio, size: Size, figures: dict[str, list[float]]) -> Found:
    spread = ratio(figures[wanted.of], figures[wanted.to])
    return Found(wanted.of, wanted.to, spread, wanted.target(size))


def run(
    rows: Sequence[Row], effort: Effort, sizes: Callable[[Row], Sequence[Size]]
) -> Iterator[Measured]:
    """Measures rows one after the other, each at its sizes; all of it in each process.

    Args:
      rows: the rows; more than one process can only measure those of `ROWS`.
      effort: how long to measure.
      sizes: the sizes of a row.

    Yields:
      What is known of a row at a size by now; a later process has more rounds of it.
    """
    pooled: dict[tuple[str, Size], dict[str, list[float]]] = {}
    for number in range(effort.processes):
        with _process(effort) as measure:
            for row in rows:
                # What is counted is the same in every process.
                is_pooled = row.unit == "s" and row.rounds is None
                part = effort.of_one_process.with_rounds(row.rounds)
                for size in sizes(row) if is_pooled or number == 0 else ():
                    known = pooled.setdefault((row.name, size), {})
                    for name, found in measure(row, size, part).items():
                        known.setdefault(name, []).extend(found)
                    yield _measured_as(row, size, known)


@contextlib.contextmanager
def _process(effort: Effort) -> Iterator[Callable[[Row, Size, Effort], dict[str, list[float]]]]:
    """`figures` in a process of its own, or in this one if there is to be one alone."""
    if effort.processes == 1:
        yield figures
        return
    # A fork would be of a process whose threads JAX has started.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield lambda row, size, part: pool.submit(_figures_of, row.name, size, part).result()


def growth(measured: Sequence[Measured], row: str, subject: str) -> float | None:
    """The exponent of a subject's growth with the size: 1 is linear. None for a single size."""
    found = [m for m in measured if m.row == row and subject in m.subjects]
    points = [(m.size, m.subjects[subject].median) for m in found]
    known = [(size, figure) for size, figure in points if isinstance(size, int) and figure > 0]
    if len(known) < 2:
        return None
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in known), strict=True)
    return statistics.linear_regression(xs, ys).slope


def environment(effort: Effort) -> dict[str, Any]:
    """What the figures depend on; nothing that names a machine or a person."""
    device = jax.devices()[0]
    return {
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "device": f"{jax.device_count()} x {device.device_kind}",
        "rounds": effort.rounds,
        "turn": effort.turn,
        "processes": effort.processes,
    }


def _processor() -> str | None:
    """The processor's model, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), None)


def to_json(environment: dict[str, Any], measured: Sequence[Measured]) -> str:
    """A run as JSON."""
    rows = [dataclasses.asdict(one) for one in measured]
    return json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"


def from_json(text: str) -> tuple[dict[str, Any], tuple[Measured, ...]]:
    """The inverse of `to_json`."""
    read = json.loads(text)
    return read["environment"], tuple(_measured(row) for row in read["rows"])


def _measured(row: dict[str, Any]) -> Measured:
    subjects = {name: Spread(**spread) for name, spread in row["subjects"].items()}
    ratios = tuple(Found(**{**r, "found": Spread(**r["found"])}) for r in row["ratios"])
    return Measured(**{**row, "subjects": subjects, "ratios": ratios})
