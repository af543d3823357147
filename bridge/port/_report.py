"""A plan as a table."""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ._entries import Entry

_WIDTH = 120
_COLUMNS = ("", "source", "target", "shape", "by")
# What rich puts between and around five columns.
_BETWEEN = 4 * 3 + 2
_ORDER = ("rule", "ambiguous", "unsupported", "mis-shaped", "missing", "unexpected", "lossy")


def table(entries: Sequence[Entry], heading: str, left_alone: Sequence[str]) -> str:
    """The entries as a table of fixed width without colours, the problems first.

    Args:
      entries: what the plan says.
      heading: what is moved where.
      left_alone: the paths of what is no weight.
    """
    rows = [_row(entry) for entry in sorted(entries, key=_rank)]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, width in zip(_COLUMNS, _widths(rows), strict=True):
        shown.add_column(name, width=width, overflow="fold")
    for kind, source, target, *rest in rows:
        widths = [column.width or 0 for column in shown.columns[1:3]]
        shown.add_row(kind, _folded(source, widths[0]), _folded(target, widths[1]), *rest)
    lines = [summary(entries, heading), _text(shown)]
    if left_alone:
        text = f"no weights, left alone: {', '.join(left_alone)}"
        lines.append(textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def summary(entries: Sequence[Entry], heading: str) -> str:
    """How many entries there are of each kind, in one line."""
    counts = Counter(entry.kind for entry in entries)
    ordered = [*_ORDER, "matched", "kept"]
    parts = [f"{counts[kind]} {kind}" for kind in ordered if counts[kind]] or ["nothing"]
    return f"{heading}: {', '.join(parts)}"


def _row(entry: Entry) -> list[str]:
    how = "; ".join(text for text in (entry.rule, entry.note) if text)
    source, target = _braced(entry.source, "/"), _braced(entry.target, ".")
    return [entry.kind, source, target, _shapes(entry), how]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns' widths: the paths get what they need, the rest is wrapped into what is left."""
    needed = [
        max([len(name), *(len(line) for row in rows for line in row[column].split("\n"))])
        for column, name in enumerate(_COLUMNS)
    ]
    kind, source, target, shape, how = needed
    how, shape = min(how, 30), min(shape, 24)
    left = _WIDTH - kind - shape - how - _BETWEEN
    if source + target > left:
        source = max(min(source, left - min(target, left // 2)), left // 3)
        target = left - source
    return [
        kind,
        source,
        target,
        shape,
        min(needed[4], _WIDTH - kind - source - target - shape - _BETWEEN),
    ]


def _folded(text: str, width: int) -> str:
    """Text broken behind the separators of its paths, where it is too long."""
    lines: list[str] = []
    for line in text.split("\n"):
        start = ""
        for part in re.findall(r"[^/.,]+[/.,]*|[/.,]+", line):
            if len(start + part) > width and start.strip():
                lines.append(start)
                start = "  "
            start += part
        lines.append(start)
    return "\n".join(lines)


def _braced(paths: Sequence[str], separator: str) -> str:
    """Paths that differ in one place as one: `cell/{ir,iz,in}/kernel`; else one to a line."""
    separator = "/" if any("/" in path for path in paths) else separator
    split = [path.split(separator) for path in paths]
    if len({len(parts) for parts in split}) == 1:
        columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
        if sum(len(column) > 1 for column in columns) == 1:
            return separator.join(
                "{" + ",".join(column) + "}" if len(column) > 1 else column[0] for column in columns
            )
    return "\n".join(paths)


def _shapes(entry: Entry) -> str:
    source, target = (
        ", ".join(dict.fromkeys(shapes)) for shapes in (entry.source_shapes, entry.target_shapes)
    )
    return "\n-> ".join(dict.fromkeys(text for text in (source, target) if text))


def _rank(entry: Entry) -> int:
    return _ORDER.index(entry.kind) if entry.kind in _ORDER else len(_ORDER)


def _text(shown: Table) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=_WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
