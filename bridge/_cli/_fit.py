"""Lays out a table: as wide as its content, or no wider than a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2
# A part with its trailing separators, after which a line may break.
_PART = re.compile(r"[^/., ]+[/., ]*|[/., ]+")


class _Column(NamedTuple):
    heading: str
    cells: list[Text]
    is_number: bool

    @property
    def texts(self) -> list[str]:
        """The heading and the cells, a line each."""
        return [self.heading, *(" ".join(cell.plain.split("\n")) for cell in self.cells)]

    @property
    def natural(self) -> int:
        return max(map(cell_len, self.texts))

    def padded(self) -> list[str]:
        """The heading and the cells, all of one width."""
        width = self.natural
        pairs = [(text, " " * (width - cell_len(text))) for text in self.texts]
        return [blanks + text if self.is_number else text + blanks for text, blanks in pairs]

    def least(self, most: int) -> int:
        """How narrow the column can be without breaking a word that is not longer than `most`."""
        if self.is_number:
            return self.natural
        longest = max(
            len(part.rstrip()) for text in self.texts for part in _PART.findall(text) or [""]
        )
        return min(longest, most)


def fitted(table: Table, console: Console) -> Table:
    """A table of the same cells that is no wider than a terminal; none of them is left out.

    Cells are wrapped between the parts of paths. If the columns do not fit beside each other even
    so, each row is a block with a line for each column.
    """
    columns = _columns(table)
    available = console.width - _GAP * (len(columns) - 1)
    if sum(column.natural for column in columns) <= available:
        return table
    widths = _widths(columns, available)
    if widths is None:
        return _blocks(columns, console.width)
    new = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=table.header_style)
    for column, width in zip(columns, widths, strict=True):
        new.add_column(
            "\n".join(_lines(column.heading, width)),
            justify="right" if column.is_number else "left",
            width=width,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = zip(row, widths, strict=True)
        new.add_row(*(Text("\n".join(_lines(c.plain, w)), c.style) for c, w in cells))
    return new


def lines_of(table: Table) -> list[str]:
    """A table as lines as wide as its content, one for each row."""
    columns = [column.padded() for column in _columns(table)]
    return [(" " * _GAP).join(row).rstrip() for row in zip(*columns, strict=True)]


def _columns(table: Table) -> list[_Column]:
    return [
        _Column(str(c.header), [_text(cell) for cell in c.cells], c.justify == "right")
        for c in table.columns
    ]


def _widths(columns: Sequence[_Column], available: int) -> list[int] | None:
    """How wide each column is, the widest made narrower first; None if they do not fit."""
    widths = [column.natural for column in columns]
    least = [column.least(available // 2) for column in columns]
    while (excess := sum(widths) - available) > 0:
        can = [n for n, width in enumerate(widths) if width > least[n]]
        if not can:
            return None
        widest = max(can, key=lambda n: widths[n])
        widths[widest] = max(least[widest], widths[widest] - max(1, excess // len(can)))
    return widths


def _blocks(columns: Sequence[_Column], width: int) -> Table:
    """A block for each row, with a line for each cell that is not empty."""
    side = max(len(column.heading) for column in columns)
    beside = max(width - side - _GAP, 1)
    new = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
    new.add_column(width=side, no_wrap=True)
    new.add_column(width=beside, overflow="fold")
    for number, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if number:
            new.add_row("", "")
        for column, cell in zip(columns, row, strict=True):
            if cell.plain:
                lines = "\n".join(_lines(cell.plain, beside))
                new.add_row(Text(column.heading, "bold"), Text(lines, cell.style))
    return new


def _lines(text: str, width: int) -> list[str]:
    """Text in lines of at most some width; only a longer word is broken inside."""
    lines: list[str] = []
    for line in text.split("\n"):
        start = ""
        for part in _PART.findall(line):
            if start.strip() and len((start + part).rstrip()) > width:
                lines.append(start.rstrip())
                start = ""
            start += part
        lines.append(start)
    return lines


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))
