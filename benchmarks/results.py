"""What a run found, as plain data: made by the rows, kept as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from .measure import Effort, Spread, ratio, seconds
from .models import case_of
from .rows import Ratio, Row, Size

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


def measure(row: Row, size: Size, effort: Effort) -> Measured:
    """Measures a row at a size."""
    case = (row.case or case_of)(size)
    subjects = row.subjects_at(size)
    if row.unit == "s":
        calls = {name: subject(case) for name, subject in subjects.items()}
        figures = seconds(calls, effort, row.is_dispatch)
    else:
        figures = {name: [float(subject(case))] for name, subject in subjects.items()}
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
    """Measures rows one after the other, each at its sizes."""
    for row in rows:
        for size in sizes(row):
            yield measure(row, size, effort)


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
