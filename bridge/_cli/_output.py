"""Writes results: in colour to a terminal, plain and never wrapped to a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ._fit import fitted, lines_of
from ._stdout import document_stream

BAR_WIDTH = 30
VERSION = 1
"""That of every JSON document."""
PATIENCE = 1.0
"""Seconds before a progress display appears."""
# Paths and shapes have brackets and colons, which rich would take for markup and emoji.
_LITERAL: Any = {"highlight": False, "markup": False, "emoji": False}


def show(*renderables: str | Table) -> None:
    """Writes to stdout.

    A terminal gets its own width and colours. Anything else gets as many columns as the content
    needs, so that a line of a table is one line for `grep` and `awk`, without control sequences or
    blanks at its end.
    """
    console = _console()
    for renderable in renderables:
        if not console.is_terminal:
            lines = [renderable] if isinstance(renderable, str) else lines_of(renderable)
            _write("".join(f"{line}\n" for line in lines), sys.stdout)
        elif isinstance(renderable, str):
            console.print(renderable, soft_wrap=True)
        else:
            console.print(fitted(renderable, console))


def show_json(name: str, document: Mapping[str, Any]) -> None:
    """Writes one JSON document to stdout, where nothing else is written; its name says its form."""
    whole = {"schema": f"linen-nnx-bridge/{name}", "version": VERSION, **document}
    _write(json.dumps(whole, indent=2, allow_nan=False) + "\n", document_stream())


def show_suggestions(name: str, suggestions: Any, *, as_json: bool, lacking: str = "") -> None:
    """Writes the rules of a `port.Suggestions`: as Python and TOML, or as one JSON document.

    Args:
        name: that of the command's own document.
        suggestions: the rules.
        as_json: whether to write JSON.
        lacking: what would tell the order of calls in both models, which these rules do not take
            into account; empty if they do.
    """
    if as_json:
        show_json(f"{name}-suggestions", json.loads(suggestions.to_json()))
    else:
        lines = [str(suggestions)]
        lines += [f"# the order of calls was not compared; {lacking}"] if lacking else []
        if suggestions.rules:
            lines += ["", "# for --rules:", suggestions.to_toml().rstrip()]
        show(*lines)


def _console(**options: Any) -> Console:
    """A console that has neither colours nor bold where `NO_COLOR` is set."""
    plain = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(**_LITERAL, **plain, **options)


def new_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines between its cells, which pipes well.

    In a narrow terminal its cells are wrapped; numbers, which are on the right, stay whole.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        is_number = heading in right
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=is_number or index == 0,
            overflow="fold",
        )
    return table


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar; full only if the share is 1, empty only if it is 0."""
    cells = round(share * BAR_WIDTH)
    if 0 < share < 1:
        cells = min(max(cells, 1), BAR_WIDTH - 1)
    full, empty = ("█", "░") if is_unicode() else ("#", ".")
    return full * cells + empty * (BAR_WIDTH - cells)


def is_unicode() -> bool:
    """Whether stdout can show more than ASCII."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")


def byte_text(count: int) -> str:
    """A number of bytes for people: `512 B`, `1.5 KiB`."""
    size, units = float(count), iter(("KiB", "MiB", "GiB", "TiB", "PiB"))
    if size < 1024:
        return f"{count} B"
    unit = ""
    while size >= 1024 and (following := next(units, None)):
        size, unit = size / 1024, following
    return f"{size:.1f} {unit}"


def short_shape(shape: Sequence[int] | None) -> str:
    """A shape as `2x3`, `scalar`, or nothing for what is not one array."""
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def share_text(share: float) -> str:
    """A share as a percentage that never rounds up to 100% or down to 0%."""
    shown = f"{share:.1%}"
    if share < 1 and shown == "100.0%":
        return ">99.9%"
    return "<0.1%" if share > 0 and shown == "0.0%" else shown


@contextlib.contextmanager
def working(what: str) -> Iterator[Progress]:
    """A progress display on stderr, in a terminal alone, if the work takes a second or more.

    The caller adds tasks with a total where there is one; without any it turns. It is gone when the
    work is done.
    """
    console = _console(stderr=True)
    progress = Progress(console=console, transient=True)
    progress.add_task(what, total=None)
    if not console.is_terminal:
        yield progress
        return
    starting = threading.Timer(PATIENCE, progress.start)
    starting.start()
    try:
        yield progress
    finally:
        starting.cancel()
        starting.join()
        progress.stop()


def _write(text: str, stream: TextIO) -> None:
    """To a stream of any encoding: a name that it cannot show is escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        error.filename = "stdout"
        raise
