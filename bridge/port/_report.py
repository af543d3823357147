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
# Up to so many entries are shown one by one; beyond, so many that are alike are one.
_FEW, _ENOUGH = 40, 4
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
    """Fewer entries that say the same: repeated blocks as one, `blocks.{0..11}.fc.kernel`.

    Few entries stay as they are.
    """
    if len(entries) <= _FEW:
        return [_with_folded_paths(entry) for entry in entries]
    alike: dict[Any, list[Entry]] = {}
    for entry in entries:
        forms = (tuple(numbered(path).pieces for path in side) for side in _sides(entry))
        rule = numbered(entry.rule).pieces
        shapes = (entry.source_shapes, entry.target_shapes)
        alike.setdefault((entry.kind, rule, entry.note, shapes, *forms), []).append(entry)
    return [each for group in alike.values() for each in _folded_group(group)]


def problem_texts(entries: Sequence[Entry]) -> list[str]:
    """The entries as lines of an error, folded, and the first of them if there are many."""
    lines = [str(entry) for entry in folded_entries(entries)]
    if len(lines) > _MOST_PROBLEMS:
        left_out = len(lines) - _MOST_PROBLEMS
        lines = [*lines[:_MOST_PROBLEMS], f"... {left_out} more; {_WHOLE}"]
    return lines


def _folded_group(group: list[Entry]) -> list[Entry]:
    rows = folded_rows([(*entry.source, *entry.target) for entry in group])
    if len(rows) == len(group):
        return [_with_folded_paths(entry) for entry in group]
    count = len(group[0].source)
    one = dataclasses.replace(group[0], source=rows[0][:count], target=rows[0][count:])
    return [_with_folded_paths(one)]


def _with_folded_paths(entry: Entry) -> Entry:
    source, target = (
        tuple(folded(side)) if len(side) > _ENOUGH else side for side in _sides(entry)
    )
    shapes = (
        tuple(dict.fromkeys(own)) if len(side) > _ENOUGH else own
        for side, own in (
            (entry.source, entry.source_shapes),
            (entry.target, entry.target_shapes),
        )
    )
    one, other = shapes
    return dataclasses.replace(
        entry, source=source, target=target, source_shapes=one, target_shapes=other
    )


def _sides(entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return entry.source, entry.target


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
