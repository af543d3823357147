"""The command line: ``python -m benchmarks``; ``--help`` tells its options.

With ``--accelerator`` it measures the rows that have sizes for one, at these.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from . import curves, report, results
from .all_rows import ROWS
from .measure import FULL, QUICK
from .row import Row, Size

# Figures of an accelerator go into a folder with its name.
GPU = Path(__file__).parent / "results" / "gpu"


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if a target is missed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=results.__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds, for a look")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--size", action="append", help="such as 8 or ViT-S/16")
    parser.add_argument("--accelerator", action="store_true", help="sizes that fill one")
    parser.add_argument("--output", type=Path, help="a folder for the JSON and the picture")
    chosen = parser.parse_args(arguments)
    # Rows are measured in a process of their own, and this one asks for the device's name: by
    # default it would then hold three quarters of the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if chosen.accelerator and not chosen.output:
        chosen.output = GPU / re.sub(r"\W+", "-", jax.devices()[0].device_kind)
    effort = QUICK if chosen.quick else FULL
    rows = [row for row in ROWS if not chosen.row or row.name in chosen.row]

    def sizes(row: Row) -> Sequence[Size]:
        usual = row.accelerator if chosen.accelerator else row.sizes
        if chosen.size:
            known = dict.fromkeys((*row.sizes, *row.accelerator))
            return [size for size in known if str(size) in chosen.size]
        return usual[:2] if chosen.quick else usual

    environment = results.environment(effort)
    known: dict[tuple[str, Size], results.Measured] = {}
    spent: collections.Counter[str] = collections.Counter()
    start = before = time.perf_counter()
    for one in results.run(rows, effort, sizes):
        known[one.row, one.size] = one
        if chosen.output:
            # A run that is cut short keeps what it has.
            _write_json(chosen.output, results.to_json(environment, list(known.values())))
        now = time.perf_counter()
        spent[one.row] += now - before
        before = now
        print(f"{now - start:6.0f} s  {one.row}, {one.size}", file=sys.stderr, flush=True)
    for row, seconds in spent.most_common():
        print(f"took {seconds:.0f} s: {row}", file=sys.stderr)
    measured = list(known.values())
    report.print_table(measured)
    if chosen.output:
        _draw(chosen.output, measured)
    return 1 if report.missed(measured) else 0


def _write_json(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.json").write_text(text)


def _draw(folder: Path, measured: Sequence[results.Measured]) -> None:
    if importlib.util.find_spec("matplotlib"):
        curves.draw(measured, folder / "cost.png")
    else:
        print("no picture: pip install -e '.[benchmarks]' brings matplotlib", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
