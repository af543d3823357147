"""A run as a table, on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from .measure import Spread
from .results import Found, Measured
from .row import Size

COLUMNS = ("row", "size", "ratio of", "to", "median", "quartiles", "least", "target", "met")
WIDTH = 150
_TICKS = {None: "", True: "yes", False: "no"}
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def print_table(measured: Sequence[Measured]) -> None:
    """Prints every ratio, a line each."""
    table = Table(*COLUMNS)
    for one in measured:
        for cells in _lines(one):
            table.add_row(*cells)
        table.add_section()
    console = Console()
    # A file or a pipe has no width of its own, and lines that are cut short say nothing.
    Console(width=None if console.is_terminal else WIDTH).print(table)


def summary(measured: Sequence[Measured]) -> str:
    """A Markdown table with a line for each ratio: its median at every size, and the target."""
    lines = [["measured", "ratio", "median by size", "target"], ["---"] * 4]
    by_row: dict[str, list[Measured]] = {}
    for one in measured:
        by_row.setdefault(one.row, []).append(one)
    for row, found in by_row.items():
        for first in found[0].ratios:
            here = [(one, ratio) for one in found for ratio in one.ratios if _is_same(ratio, first)]
            medians = [f"{_short(ratio)} ({_size(one.size)})" for one, ratio in here]
            bound = next((_bound(one, ratio) for one, ratio in here if ratio.target), "")
            lines.append([row, f"{first.of} / {first.to}", ", ".join(medians), bound])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(ratio: Found) -> str:
    median = ratio.found.median
    return f"{median:.2f}" if median < 10 else f"{median:.0f}"


def _bound(one: Measured, ratio: Found) -> str:
    return f"{ratio.target:.2f} from {_size(one.size)}"


def _is_same(a: Found, b: Found) -> bool:
    return (a.of, a.to) == (b.of, b.to)


def missed(measured: Sequence[Measured]) -> list[tuple[Measured, Found]]:
    """The ratios that are above their target."""
    return [(one, ratio) for one in measured for ratio in one.ratios if ratio.is_met is False]


def amount(spread: Spread, unit: str) -> str:
    """A figure with its unit."""
    if unit != "s":
        return f"{spread.median:,.0f}"
    factor, name = next((f, n) for f, n in _SCALES if spread.median >= f or n == "µs")
    return f"{spread.median / factor:.3g} {name}"


def _lines(one: Measured) -> Iterator[tuple[str, ...]]:
    for ratio in one.ratios:
        found = ratio.found
        yield (
            one.row,
            _size(one.size),
            f"{ratio.of} ({amount(one.subjects[ratio.of], one.unit)})",
            f"{ratio.to} ({amount(one.subjects[ratio.to], one.unit)})",
            f"{found.median:.3f}",
            f"{found.low:.2f}-{found.high:.2f}" if one.unit == "s" else "",
            f"{found.least:.3f}" if one.unit == "s" else "",
            "" if ratio.target is None else f"{ratio.target:.2f}",
            _TICKS[ratio.is_met],
        )


def _size(size: Size) -> str:
    return f"{size:,}" if isinstance(size, int) else size
