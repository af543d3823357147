"""`python -m bridge diff`: how two checkpoints differ, whatever their layouts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

from bridge._errors import path_text

from . import _command

_DESCRIPTION = """\
Compares two checkpoints of any layouts and formats leaf by leaf: paths that only one of them has,
shapes, dtypes, and the largest absolute difference of values. Leaves are matched by collection and
path; by path alone if one of the two is an NNX state, which has no collections. RNG state is left
out unless --rngs is given.
"""

_EPILOG = """\
exit codes:
  0  no difference
  1  the checkpoints differ
  2  wrong usage, or one of them cannot be read

examples:
  python -m bridge diff before after
  python -m bridge diff before after --atol 1e-6 --rtol 1e-5 --ignore-dtype
  python -m bridge diff model.msgpack checkpoints/model --json > difference.json

The JSON document is {"schema": "linen-nnx-bridge/diff", "version": 1, "same": bool,
"a": {"checkpoint": str, "layout": str, "format": str}, "b": likewise, "equal": int,
"only_in_a": [str], "only_in_b": [str], "changed": [{"path": str, "what": ["structure" | "shape" |
"values" | "dtype"], "shapes": [[int] | null, [int] | null], "dtypes": [str | null, str | null],
"max_abs_difference": number | "inf" | null}]}.
"""

SCHEMA = "linen-nnx-bridge/diff"
VERSION = 1


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `diff` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "diff",
        "compare two checkpoints of any layouts",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument("a", metavar="A", help="a checkpoint's directory or file")
    parser.add_argument("b", metavar="B", help="another one's")
    for name, meaning in (("--rtol", "relative to B"), ("--atol", "absolute")):
        parser.add_argument(
            name,
            type=_tolerance,
            default=0.0,
            metavar="X",
            help=f"how far values may differ, {meaning} (default: not at all)",
        )
    parser.add_argument(
        "--ignore-dtype", action="store_true", help="the same values in another dtype are the same"
    )
    parser.add_argument("--rngs", action="store_true", help="compare RNG state too")


def _run(arguments: argparse.Namespace) -> int:
    from . import _comparison, _leaves, _output

    contents = []
    with _output.working("comparing checkpoints") as progress:
        task = progress.add_task("reading", total=2)
        for path in (arguments.a, arguments.b):
            contents.append(_leaves.read(path))
            progress.advance(task)
        comparison = _comparison.compare(
            *_named(contents, rngs=arguments.rngs),
            rtol=arguments.rtol,
            atol=arguments.atol,
            ignore_dtype=arguments.ignore_dtype,
        )
    document = _document((arguments.a, arguments.b), contents, comparison)
    if arguments.json:
        _output.show_json(document)
    else:
        _output.show(*_renderables(document))
    return _command.OK if comparison.is_same else _command.FAILED


def _named(contents: Any, *, rngs: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves of both checkpoints by one text, which means the same in both."""
    both = [content if rngs else content.without_rngs() for content in contents]
    if all(content.has_collections for content in both):
        a, b = ({path_text(*at): v for at, v in x.by_address().items()} for x in both)
    else:
        a, b = ({"/".join(p): v for p, v in x.by_path().items()} for x in both)
    return _without_value(a, b), _without_value(b, a)


def _without_value(leaves: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Orbax and msgpack write a Variable or a box as a mapping with the key `value`."""
    own: dict[str, Any] = {}
    for name, leaf in leaves.items():
        shorter = name.removesuffix("/value")
        is_inside = name not in others and shorter in others and shorter not in leaves
        own[shorter if is_inside else name] = leaf
    return own


def _document(paths: tuple[str, str], contents: Any, comparison: Any) -> dict[str, Any]:
    sides = [
        {"checkpoint": path, "layout": content.layout.layout, "format": content.layout.format}
        for path, content in zip(paths, contents, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "same": comparison.is_same,
        "a": sides[0],
        "b": sides[1],
        "equal": comparison.equal,
        "only_in_a": list(comparison.only_a),
        "only_in_b": list(comparison.only_b),
        "changed": [
            {
                "path": difference.name,
                "what": list(difference.what),
                "shapes": [None if s is None else list(s) for s in difference.shapes],
                "dtypes": list(difference.dtypes),
                "max_abs_difference": _number(difference.max_abs),
            }
            for difference in comparison.changed
        ],
    }


def _number(value: float | None) -> float | str | None:
    # JSON has no infinity.
    return "inf" if value is not None and math.isinf(value) else value


def _renderables(document: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    from ._output import new_table, shape_text

    for side in ("a", "b"):
        entry = document[side]
        yield f"{side}: {entry['checkpoint']} (layout {entry['layout']}, {entry['format']})"
    rows = [
        *(
            (f"only in {side}", path, "", "", "")
            for side in "ab"
            for path in document[f"only_in_{side}"]
        ),
        *(
            (
                ", ".join(entry["what"]),
                entry["path"],
                _both(shape_text(s) for s in entry["shapes"]),
                _both(d or "" for d in entry["dtypes"]),
                _size(entry["max_abs_difference"]),
            )
            for entry in document["changed"]
        ),
    ]
    if rows:
        yield ""
        table = new_table("difference", "path", "shape", "dtype", "max |a - b|")
        for row in rows:
            table.add_row(*map(Text, row))
        yield table
        yield ""
    count = len(rows)
    yield f"{document['equal']:,} leaves are the same, {count:,} differ"


def _both(texts: Any) -> str:
    first, second = texts
    return first if first == second else f"{first} -> {second}"


def _size(value: float | str | None) -> str:
    return value or "" if isinstance(value, str | None) else f"{value:.3g}"


def _tolerance(text: str) -> float:
    return _command.number(text, "a number from 0 on", lambda x: 0 <= x < math.inf)
