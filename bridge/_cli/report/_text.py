"""A report in a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from bridge._cli._output import bar, byte_text, is_unicode, new_table, share_text

LABELS = {
    "linen": "Linen",
    "nnx": "NNX",
    "wrapped-linen": "Linen in ToNNX",
    "wrapped-nnx": "NNX in ToLinen",
}
_STYLES = {"linen": "yellow", "nnx": "green", "wrapped-linen": "magenta", "wrapped-nnx": "cyan"}


_NUMBERS = ("own", "parameters", "bytes")


def renderables(document: Mapping[str, Any]) -> Iterator[str | Table]:
    """The table of modules, the migrated shares and the notes."""
    rows = list(_rows(document["modules"]))
    yield _table(rows)
    yield ""
    yield from _shares(document["migrated"])
    for note in document["notes"]:
        yield f"note: {note}"
    if document["check"] is not None:
        yield check_text(document["check"])


def _table(rows: Sequence[Mapping[str, str | Text]]) -> Table:
    table = new_table(*rows[0], right=_NUMBERS)
    for row in rows:
        table.add_row(*row.values())
    return table


def _rows(modules: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str | Text]]:
    for guide, module in zip(_guides([m["depth"] for m in modules]), modules, strict=True):
        yield {
            "module": Text(f"{guide}{module['name'] or 'model'}"),
            "class": Text(module["class"] or "?"),
            "kind": Text(LABELS[module["kind"]], _STYLES[module["kind"]]),
            "own": f"{module['own']['parameters']:,}",
            "parameters": f"{module['total']['parameters']:,}",
            "bytes": byte_text(module["total"]["bytes"]),
            "source": Text(source_text(module["source"])),
            "NNX counterpart": Text(counterpart_text(module)),
        }


def source_text(source: Mapping[str, Any] | None) -> str:
    """A class's place in the program, or what it is imported by."""
    if source is None:
        return "?"
    return source["import_path"] if source["file"] is None else f"{source['file']}:{source['line']}"


def counterpart_text(module: Mapping[str, Any]) -> str:
    """What stands for a Linen class in NNX."""
    exists = module["counterpart"]["exists"]
    if exists is None:
        return "" if module["kind"] in ("nnx", "wrapped-nnx") else "to be written"
    return module["counterpart"]["name"] if exists else "none"


def check_text(check: Mapping[str, Any]) -> str:
    """What `--check` found."""
    return (
        f"check {'passed' if check['passed'] else 'FAILED'}: {share_text(check['share'])} of the"
        f" {check['by']} are native NNX, at least {check['min_migrated']:.1%} wanted"
    )


def _shares(migrated: Mapping[str, Any]) -> Iterator[str]:
    parameters, modules = migrated["parameters"], migrated["modules"]
    size = f"{byte_text(parameters['native_bytes'])} of {byte_text(parameters['total_bytes'])}"
    yield f"migrated to NNX  {_share('parameters', parameters)}, {size}"
    yield f"                 {_share('modules', modules)}"


def _share(what: str, counts: Mapping[str, Any]) -> str:
    return (
        f"{what:<10}  {bar(counts['share'])}  {share_text(counts['share']):>6}"
        f"  {counts['native']:,} of {counts['total']:,}"
    )


def _guides(depths: Sequence[int]) -> Iterator[str]:
    """The lines that lead to each row of a tree, for the depths of the rows in order."""
    middle, last, through = ("├── ", "└── ", "│   ") if is_unicode() else ("|-- ", "`-- ", "|   ")
    for index, depth in enumerate(depths):
        parts = []
        for level in range(1, depth + 1):
            rest = (d for d in depths[index + 1 :] if d <= level)
            goes_on = next(rest, 0) == level
            if level == depth:
                parts.append(middle if goes_on else last)
            else:
                parts.append(through if goes_on else "    ")
        yield "".join(parts)
