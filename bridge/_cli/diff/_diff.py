"""The differences of two checkpoints, as a JSON document and as a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from bridge._cli import _checkpoints, _conversion, _rules_file
from bridge._cli._checkpoints import CheckpointContents, text_of
from bridge._cli._input_errors import InputError
from bridge._cli._output import new_table, short_shape
from bridge._cli._result import Result
from bridge._conversion.neutral import Leaf, Path

from . import _comparison

_HEADINGS = (
    "difference",
    "path",
    "shape",
    "dtype",
    "max |a - b|",
    "max |a - b| / |b|",
    "NaN",
)


def compared(arguments: argparse.Namespace) -> Result:
    """Compares the leaves of two checkpoints.

    Raises CheckpointError if one of them cannot be read, PortError if the Linen checkpoint does not
    fit `--model`, and InputError if there is no Linen checkpoint to convert or `--filter` leaves no
    leaf.
    """
    rules = _rules_file.load(arguments.rules)
    contents = [
        _checkpoints.read(arguments.a, arguments.a_within or arguments.within, arguments.a_layout),
        _checkpoints.read(arguments.b, arguments.b_within or arguments.within, arguments.b_layout),
    ]
    layouts = [each.layout for each in contents]
    if arguments.rules or arguments.model:
        contents = _in_one_layout(contents, rules, arguments)
    a, b = _by_one_path(contents, rngs=arguments.rngs)
    kept = _checkpoints.filtered({**a, **b}, arguments.filter)
    comparison = _comparison.compare(
        {path: leaf for path, leaf in a.items() if path in kept},
        {path: leaf for path, leaf in b.items() if path in kept},
        rtol=arguments.rtol,
        atol=arguments.atol,
        ignore_dtype=arguments.ignore_dtype,
    )
    sides = {
        side: {
            "checkpoint": path,
            "layout": layout.layout,
            "format": layout.format,
            "extra": [*_checkpoints.beside(layout)],
        }
        for side, path, layout in zip("ab", (arguments.a, arguments.b), layouts, strict=True)
    }
    document = {"same": comparison.is_same, **sides, **_document(comparison)}
    return Result("diff", document, _shown(document), comparison.is_same)


def _in_one_layout(
    contents: Sequence[CheckpointContents],
    rules: Mapping[str, str] | None,
    arguments: argparse.Namespace,
) -> list[CheckpointContents]:
    """Both checkpoints with NNX paths: the Linen one is renamed, or converted for a model."""
    linen = [content for content in contents if content.is_linen]
    if len(linen) != 1:
        both, remedy = ("Linen's", "nnx") if linen else ("NNX's", "linen")
        raise InputError(
            "--rules and --model",
            f"two checkpoints that are {both}",
            "one of Linen's and one of NNX's",
            "leave them out: paths are compared as they are; or, if a checkpoint is taken for what"
            f" it is not, give --a-layout {remedy} or --b-layout {remedy}",
        )
    conversion = _conversion.conversion_of(linen[0], rules, arguments)
    if not conversion.to_nnx:
        raise InputError("--model", "a Linen model", "an NNX model", "name the other one")
    state: nnx.State = conversion.make()
    return [_checkpoints.of_state(c.layout, state) if c.is_linen else c for c in contents]


def _by_one_path(
    contents: Sequence[CheckpointContents], *, rngs: bool
) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
    """The leaves of both checkpoints by one path, which means the same in both."""
    both = [content if rngs else content.without_rngs() for content in contents]
    if all(content.has_collections for content in both):
        a, b = ({(c, *path): v for (c, path), v in x.by_address().items()} for x in both)
    else:
        a, b = (x.by_path() for x in both)
    return _without_value(a, b), _without_value(b, a)


def _without_value(leaves: dict[Path, Leaf], others: dict[Path, Leaf]) -> dict[Path, Leaf]:
    """Orbax and msgpack write a Variable or a box as a mapping with the key `value`."""
    own: dict[Path, Leaf] = {}
    for path, leaf in leaves.items():
        shorter = path[:-1] if path[-1:] == ("value",) else path
        is_inside = path not in others and shorter in others and shorter not in leaves
        own[shorter if is_inside else path] = leaf
    return own


def _document(comparison: _comparison.Differences) -> dict[str, Any]:
    return {
        "equal": comparison.equal,
        "only_in_a": list(map(text_of, comparison.only_a)),
        "only_in_b": list(map(text_of, comparison.only_b)),
        "changed": [
            {
                "path": text_of(difference.path),
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


def _shown(document: Mapping[str, Any]) -> Iterator[Any]:
    for side in "ab":
        entry = document[side]
        yield f"{side}: {entry['checkpoint']} (layout {entry['layout']}, {entry['format']})"
    rows = list(_rows(document))
    if rows:
        yield ""
        # Without NaN, leave out its column.
        count = len(_HEADINGS) if any(row[-1] for row in rows) else len(_HEADINGS) - 1
        yield new_table(_HEADINGS[:count], [row[:count] for row in rows])
        yield ""
    equal = document["equal"]
    are = "leaf is" if equal == 1 else "leaves are"
    yield f"{equal:,} {are} the same, {len(rows):,} {'differs' if len(rows) == 1 else 'differ'}"
    extra = {side: ", ".join(document[side]["extra"]) for side in "ab"}
    if any(extra.values()):
        both = "; ".join(f"{side} has {names or 'nothing'}" for side, names in extra.items())
        yield f"beside the model, and not compared: {both}"


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each leaf that is not the same."""
    for side in "ab":
        for path in document[f"only_in_{side}"]:
            yield f"only in {side}", path, "", "", "", "", ""
    for entry in document["changed"]:
        counts = zip(entry["nan_in_one"], "ab", strict=True)
        yield (
            ", ".join(entry["what"]),
            entry["path"],
            _both(*map(short_shape, entry["shapes"])),
            _both(*(dtype or "" for dtype in entry["dtypes"])),
            _size(entry["max_abs_difference"]),
            _size(entry["max_relative_difference"]),
            ", ".join(f"{count:,} in {side} only" for count, side in counts if count),
        )


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first} -> {second}"


def _size(value: float | str | None) -> str:
    return value or "" if isinstance(value, str | None) else f"{value:.3g}"
