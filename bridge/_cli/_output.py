"""Holds what a command found, and writes it.

As wide as a terminal, in whole lines to a pipe, or as one JSON document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

VERSION = 1
"""That of every JSON document."""
# Paths and shapes have brackets and colons, which rich would take for markup and emoji.
_LITERAL: Any = {"highlight": False, "markup": False, "emoji": False}
# As many columns as any line needs.
_UNLIMITED = 100_000


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        schema: the name of the JSON document.
        document: the JSON document.
        shown: the same for people: lines, and tables of `new_table`.
        ok: whether every check held, and what was compared is the same.
    """

    schema: str
    document: Mapping[str, Any]
    shown: Iterable[Any]
    ok: bool = True


def write(result: Result, *, as_json: bool) -> None:
    """Writes what a command found to stdout.

    A pipe gets as many columns as the content needs, so that a row of a table is one line for
    `grep` and `awk`, without control sequences or blanks at its end.
    """
    if as_json:
        head = {"schema": f"linen-nnx-bridge/{result.schema}", "version": VERSION}
        text = json.dumps({**head, **result.document}, indent=2, allow_nan=False)
    else:
        console = Console(**_LITERAL)
        with console.capture() as capture:
            _print(console, result.shown)
        text = capture.get()
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.splitlines())
    sys.stdout.flush()


def html_of(shown: Iterable[Any]) -> str:
    """The same as a piece of HTML."""
    console = Console(file=io.StringIO(), record=True, **_LITERAL)
    _print(console, shown)
    return console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)


def _print(console: Console, shown: Iterable[Any]) -> None:
    if not console.is_terminal:
        console.width = _UNLIMITED
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str))


def new_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Collection[str] = (),
) -> Table:
    """A table without lines between its cells, which pipes well.

    In a narrow terminal its cells are folded and not cut. The columns with headings in `right` hold
    numbers.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def byte_text(count: int) -> str:
    """A number of bytes for people: `512 B`, `1.5 KiB`."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 5)
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def short_shape(shape: Sequence[int] | None) -> str:
    """A shape as `2x3`, `scalar`, or nothing for what is not one array."""
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


@contextlib.contextmanager
def working(what: str, *, is_json: bool) -> Iterator[Callable[[str], None]]:
    """Shows the progress of a block on stderr, if that is a terminal; yields what changes it.

    With `is_json`, what Python prints in the block goes to stderr, as stdout is kept for one
    document.
    """
    with contextlib.ExitStack() as stack:
        if is_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        # As Text: a spinner takes a string for markup, whatever its console does.
        status = stack.enter_context(Console(stderr=True, **_LITERAL).status(Text(what)))
        yield lambda text: status.update(Text(text))
