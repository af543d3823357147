"""The differences of two checkpoints as a JSON document and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from bridge._cli._output import new_table, short_shape
from bridge._conversion.neutral import Path


def document_path(path: Path) -> str:
    """A path as the document has it."""
    return "/".join(map(str, path))


def document_of(
    paths: tuple[str, str], layouts: Any, comparison: Any, *, has_extra: bool
) -> dict[str, Any]:
    """The JSON document of a comparison; `has_extra` says whether it is of what lies beside too."""
    sides = [
        {
            "checkpoint": path,
            "layout": layout.layout,
            "format": layout.format,
            # A state by path does not show which entries lie beside the model.
            "extra": [] if layout.layout == "nnx" else list(layout.extra),
        }
        for path, layout in zip(paths, layouts, strict=True)
    ]
    return {
        "same": comparison.is_same,
        "a": sides[0],
        "b": sides[1],
        "extra_compared": has_extra,
        "equal": comparison.equal,
        "only_in_a": list(map(document_path, comparison.only_a)),
        "only_in_b": list(map(document_path, comparison.only_b)),
        "changed": [
            {
                "path": document_path(difference.path),
                "what": list(difference.what),
                "shapes": [None if s is None else list(s) for s in difference.shapes],
                "dtypes": list(difference.dtypes),
                "max_abs_difference": _number(difference.max_abs),
                "max_relative_difference": _number(difference.max_rel),
                "nan_in_one": list(difference.nan),
            }
            for difference in comparison.changed
        ],
    }


def _number(value: float | None) -> float | str | None:
    # JSON has no infinity.
    return "inf" if value is not None and math.isinf(value) else value


def renderables(document: Mapping[str, Any]) -> Iterator[Any]:
    """The document as a table."""
    for side in ("a", "b"):
        entry = document[side]
        yield f"{side}: {entry['checkpoint']} (layout {entry['layout']}, {entry['format']})"
    rows = _rows(document)
    if rows:
        yield ""
        headings = [
            "difference",
            "path",
            "shape",
            "dtype",
            "max |a - b|",
            "max |a - b| / |b|",
            "NaN",
        ]
        # Without NaN, leave out its column.
        count = len(headings) if any(row[-1] for row in rows) else len(headings) - 1
        table = new_table(*headings[:count])
        for row in rows:
            table.add_row(*map(Text, row[:count]))
        yield table
        yield ""
    count = len(rows)
    equal = document["equal"]
    are = "leaf is" if equal == 1 else "leaves are"
    yield f"{equal:,} {are} the same, {count:,} {'differs' if count == 1 else 'differ'}"
    extra = {side: ", ".join(document[side]["extra"]) for side in "ab"}
    if any(extra.values()) and not document["extra_compared"]:
        both = "; ".join(f"{side} has {names or 'nothing'}" for side, names in extra.items())
        yield f"beside the model, compared only with --extra: {both}"


def _rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each leaf that is not the same."""
    return [
        *(
            (f"only in {side}", path, "", "", "", "", "")
            for side in "ab"
            for path in document[f"only_in_{side}"]
        ),
        *(
            (
                ", ".join(entry["what"]),
                entry["path"],
                _both(short_shape(s) for s in entry["shapes"]),
                _both(d or "" for d in entry["dtypes"]),
                _size(entry["max_abs_difference"]),
                _size(entry["max_relative_difference"]),
                _nan_text(entry["nan_in_one"]),
            )
            for entry in document["changed"]
        ),
    ]


def _both(texts: Any) -> str:
    first, second = texts
    return first if first == second else f"{first} -> {second}"


def _nan_text(counts: Any) -> str:
    texts = (f"{count:,} in {side} only" for count, side in zip(counts, "ab", strict=True) if count)
    return ", ".join(texts)


def _size(value: float | str | None) -> str:
    return value or "" if isinstance(value, str | None) else f"{value:.3g}"
