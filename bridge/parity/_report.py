"""The report of a check: a value that can be asked, shown as a table, and written as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridge._rules.numbers import folded_rows

from ._divergence import Divergence
from ._numbers import Compared, worst

# Only a text needs it.
if TYPE_CHECKING:
    from rich.table import Table

SECTIONS = (
    "port plan",
    "weights",
    "outputs",
    "layers",
    "fields",
    "gradients",
    "state",
    "steps",
    "partition specs",
)
_WIDTH = 100
# What is downstream of a fault differs as well, so a few rows are enough.
_MOST = 8
_REST = "print(report.text(whole=True)) shows all, and --json on the command line"


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the comparison, such as the outputs.

    Attributes:
      name: one of `SECTIONS`.
      compared: every comparison, in the order of the model's values; layers in the order of
        execution.
      note: why there are no comparisons, or what was left out.
      is_advisory: whether differences are only shown and do not fail the report.
    """

    name: str
    compared: tuple[Compared, ...] = ()
    note: str = ""
    is_advisory: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing differs, or the section is advisory."""
        return self.is_advisory or all(c.ok for c in self.compared)

    @property
    def differing(self) -> tuple[Compared, ...]:
        """The comparisons that do not agree."""
        return tuple(c for c in self.compared if not c.ok)

    @property
    def worst(self) -> Compared | None:
        """The comparison with the largest difference, None if there is none."""
        return worst(self.compared)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a comparison: whether two models do the same, and the first layer that differs.

    Attributes:
      a: the first model's name.
      b: the second model's name.
      sections: the sections of the comparison, in order.
      first_divergence: the first layer in execution order whose outputs are further apart than its
        inputs explain, if a layer is out of tolerance; None if there is none, or if layers were not
        compared.
      first_inexact: the first layer with bitwise equal inputs and an output that agrees only within
        tolerance. If static fields differ in some of these layers, the first of those.
    """

    a: str
    b: str
    sections: tuple[Section, ...]
    first_divergence: Divergence | None = None
    first_inexact: Divergence | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs in any section."""
        return all(section.ok for section in self.sections)

    def section(self, name: str) -> Section:
        """Returns the section of a name.

        Raises:
          KeyError: there is no section of this name.
        """
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(name)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, whole: bool = False) -> str:
        """The report as plain text, 100 columns wide: the same in a terminal and a pipe.

        Args:
          whole: whether every difference has a row. Otherwise only the first of each section have,
            and repeated blocks have one row.
        """
        return _as_text(self, whole)

    def to_json(self, indent: int | None = None) -> str:
        """The report as a JSON document.

        Args:
          indent: as for `json.dumps`.

        Returns:
          The fields of the report, with `ok` for the report and each section. Numbers that are not
          finite are null.
        """
        document = _plain(dataclasses.asdict(self))
        document["ok"] = self.ok
        for entry, section in zip(document["sections"], self.sections, strict=True):
            entry["ok"] = section.ok
        return json.dumps(document, indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_text(report: Report, whole: bool) -> str:
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out, width=_WIDTH, color_system=None, markup=False, emoji=False, highlight=False
    )
    console.print(f"parity of a = {report.a} and b = {report.b}: {_headline(report)}")
    console.print(_summary(report))
    for line in _named_layer(report):
        console.print(line)
    for section in report.sections:
        if section.differing:
            rows = [_row(c) for c in section.differing]
            rows = rows if whole else _folded(rows)
            shown = rows if whole else rows[:_MOST]
            console.print(_details(section.name, shown))
            if left := len(rows) - len(shown):
                console.print(f"… and {left} more in {section.name}; {_REST}")
    for section in report.sections:
        if section.note:
            console.print(f"{section.name}: {section.note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _headline(report: Report) -> str:
    """The verdict, with the sections that it comes from."""
    nan = [s.name for s in report.sections if _verdict(s) == "NaN"]
    differing = [s.name for s in report.sections if _verdict(s) == "DIFFERS"]
    told = []
    if differing:
        told.append(f"they DIFFER in {', '.join(differing)}")
    if nan:
        told.append(f"NOTHING IS SHOWN by {', '.join(nan)}: NaN on both sides")
    advised = sum(len(s.differing) for s in report.sections if s.is_advisory)
    fields = f"{advised} static field{'s' if advised > 1 else ''}"
    if not told:
        return f"they agree, but for {fields}" if advised else "they agree"
    return "; ".join([*told, *([f"{fields} not alike"] if advised else [])])


def _summary(report: Report) -> Table:
    table = _table("compared", "verdict", "values", "bitwise", "max abs", "max rel", "worst at")
    for section in report.sections:
        worst = section.worst
        most = max((c.max_abs for c in section.compared if c.max_abs is not None), default=None)
        table.add_row(
            section.name,
            _verdict(section),
            str(len(section.compared)),
            str(sum(c.verdict == "bitwise" for c in section.compared)),
            _number(most),
            _number(worst and worst.max_rel),
            worst.place if worst and worst.verdict != "bitwise" else "",
        )
    return table


def _details(name: str, rows: Sequence[Sequence[str]]) -> Table:
    table = _table(name, "max abs", "max rel", "allowed", "at", "a", "b")
    for row in rows:
        table.add_row(*row)
    return table


def _row(c: Compared) -> tuple[str, ...]:
    place = f"{c.place}: {c.note}" if c.note else c.place
    index = "" if c.index is None else str(list(c.index))
    return place, *_numbers(c), f"{c.tolerance.rtol:.0e}", index, *_sides(c)


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Fewer rows that say the same: those of repeated blocks as one, `blocks/{0..5}/norm`."""
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for place, *cells in rows:
        # Either side of an arrow has numbers of its own.
        alike.setdefault(tuple(cells), []).append(tuple(place.split(" -> ")))
    return [
        (" -> ".join(sides), *cells)
        for cells, places in alike.items()
        for sides in folded_rows(places)
    ]


def _named_layer(report: Report) -> Iterator[str]:
    """What is said of the first layer that diverges, or else of the first that is inexact."""
    found, title = report.first_divergence, "first layer that diverges"
    if found is None:
        found = report.first_inexact
        title = "first layer that is not bitwise equal though its inputs are"
    if found is None:
        return
    names = dict.fromkeys(found.modules)
    yield f"{title}: {found.place} ({' -> '.join(names)})"
    if found.after and found.before:
        yield f"  between {found.after} and {found.before}"
    yield f"  output: {_told(found.output)}"
    if found.inputs is not None:
        yield f"  inputs: {_told(found.inputs)}"
    if not found.inputs_agree:
        yield "  its inputs differ already, and no layer before it was compared that explains it"
    for difference in found.fields:
        yield f"  {difference}"
    if found.dropout_rate and not found.fields:
        yield (
            f"  its dropout rate is {found.dropout_rate}: where dropout is on, outputs agree only"
            " if both models draw the same key, and Linen and native NNX do not"
        )
    if found.leaves_tolerance:
        yield f"  within tolerance here, and out of it in {found.leaves_tolerance}"
    if found.after:
        yield f"  the last layer before it that agrees: {found.after}"


def _told(c: Compared) -> str:
    if c.verdict == "bitwise":
        return "bitwise equal"
    abs_, rel = _numbers(c)
    a, b = _sides(c)
    if c.max_abs is None:
        return f"{a} against {b} ({c.note})"
    where = f" at {list(c.index)}: {a} against {b}" if c.index is not None else ""
    note = f" ({c.note})" if c.note else ""
    agrees = "agrees within" if c.ok else "differs by"
    return f"{agrees} max abs {abs_}, max rel {rel} (allowed {c.tolerance.rtol:.0e}){where}{note}"


def _sides(c: Compared) -> tuple[str, str]:
    shapes, dtypes = c.shapes, c.dtypes
    if shapes[0] != shapes[1] or dtypes[0] != dtypes[1] or c.values is None:
        described = [
            "" if shape is None else f"{dtype}{list(shape)}"
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        if any(described):
            return described[0], described[1]
    return c.values or ("", "")


def _numbers(c: Compared | None) -> tuple[str, str]:
    if c is None or c.max_abs is None or c.max_rel is None:
        return "", ""
    return _number(c.max_abs), _number(c.max_rel)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _verdict(section: Section) -> str:
    if not section.ok:
        return "NaN" if all(c.verdict == "nan" for c in section.differing) else "DIFFERS"
    if section.name == "fields" and section.compared:
        return "advice" if section.differing else "equal"
    if not section.compared:
        return "clean" if section.name == "port plan" else "-"
    same = all(c.verdict == "bitwise" for c in section.compared)
    return "bitwise equal" if same else "agrees"


def _table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ASCII2, show_lines=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
