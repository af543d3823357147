"""A plan as a table."""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bridge._rules.numbers import folded, folded_rows, numbered

from ._entries import Entry
from ._rule_text import braced

_WIDTH = 120
# Up to so many paths of an entry are shown one by one.
_ENOUGH = 4
_MOST_LINES, _MOST_PROBLEMS = 150, 60
_WHOLE = "print(plan.text(whole=True)) shows all"
_COLUMNS = ("", "source", "target", "shape", "by")
_ORDER = ("rule", "ambiguous", "unsupported", "mis-shaped", "missing", "unexpected", "lossy")


def table(
    entries: Sequence[Entry], heading: str, left_alone: Sequence[str], *, whole: bool = False
) -> str:
    """The entries as a table of fixed width without colours, the problems first.

    `left_alone` has the paths of what is not a weight. With `whole`, every entry gets a row of its
    own, however many there are.
    """
    ordered = sorted(entries, key=_rank)
    rows = [_row(entry) for entry in (ordered if whole else folded_entries(ordered))]
    shown = Table(*_COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown.columns:
        column.overflow = "fold"
    for row in rows:
        shown.add_row(*row)
    body = _text(shown).split("\n")
    if not whole and len(body) > _MOST_LINES:
        left_out = len(body) - _MOST_LINES
        body = [*body[:_MOST_LINES], f" ... {left_out} more lines; {_WHOLE}"]
    lines = [summary(entries, heading), *body]
    if left_alone:
        names = left_alone if whole else folded(left_alone)
        text = f"no weights, left alone: {', '.join(names)}"
        note = textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        lines += note if whole or len(note) <= 10 else [*note[:10], f"  ...; {_WHOLE}"]
    return "\n".join(lines)


def folded_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Fewer entries that say the same: repeated blocks as one, `blocks.{0..11}.fc.kernel`."""
    alike: dict[Any, list[Entry]] = {}
    for entry in entries:
        sides = [folded(x) if len(x) > _ENOUGH else x for x in (entry.source, entry.target)]
        short = dataclasses.replace(entry, source=tuple(sides[0]), target=tuple(sides[1]))
        forms = [[numbered(path).pieces for path in side] for side in (*sides, [entry.rule])]
        key = entry.kind, entry.note, entry.source_shapes, entry.target_shapes, str(forms)
        alike.setdefault(key, []).append(short)
    found: list[Entry] = []
    for first, *others in alike.values():
        row, *more = folded_rows([(*each.source, *each.target) for each in (first, *others)])
        count = len(first.source)
        one = dataclasses.replace(first, source=row[:count], target=row[count:])
        found += [first, *others] if more else [one]
    return found


def problem_texts(entries: Sequence[Entry]) -> list[str]:
    """The entries as lines of an error, folded, and the first of them if there are many."""
    lines = [str(entry) for entry in folded_entries(entries)]
    if len(lines) > _MOST_PROBLEMS:
        left_out = len(lines) - _MOST_PROBLEMS
        lines = [*lines[:_MOST_PROBLEMS], f"... {left_out} more; {_WHOLE}"]
    return lines


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


def _braced(paths: Sequence[str], separator: str) -> str:
    """Paths that differ in one place as one: `cell/{ir,iz,in}/kernel`; else one to a line."""
    separator = "/" if any("/" in path for path in paths) else separator
    return braced(paths, separator) or "\n".join(paths)


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
