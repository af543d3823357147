"""`python -m bridge diff`: how two checkpoints differ, whatever their layouts."""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from bridge._neutral import Leaf, Path

from . import _command

_DESCRIPTION = """\
Compares two checkpoints of any layouts and formats leaf by leaf: paths that only one of them has,
shapes, dtypes, and the largest absolute and relative difference of values. Leaves are matched by
collection and path; by path alone if one of the two is an NNX state, which has no collections. RNG
state is left out unless --rngs is given.
"""

_EPILOG = """\
exit codes:
  0  no difference
  1  the checkpoints differ
  2  wrong usage, or one of them cannot be read

examples:
  python -m bridge diff before after
  python -m bridge diff before after --atol 1e-6 --rtol 1e-5 --ignore-dtype
  python -m bridge diff linen_checkpoint nnx_checkpoint --rules rules.toml
  python -m bridge diff linen_checkpoint nnx_checkpoint --model models.py:make_nnx
  python -m bridge diff before after --filter 'kernel$'
  python -m bridge diff model.msgpack checkpoints/model --json > difference.json

The JSON document is {"schema": "linen-nnx-bridge/diff", "version": 1, "same": bool,
"a": {"checkpoint": str, "layout": str, "format": str}, "b": likewise, "equal": int,
"only_in_a": [str], "only_in_b": [str], "changed": [{"path": str, "what": ["structure" | "shape" |
"values" | "dtype"], "shapes": [[int] | null, [int] | null], "dtypes": [str | null, str | null],
"max_abs_difference": number | "inf" | null, "max_relative_difference": likewise,
"nan_in_one": [int, int]}]}; the last is how many elements are NaN in a alone, and in b alone.
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
    parser.add_argument(
        "--rules",
        metavar="FILE",
        type=pathlib.Path,
        help="a table of paths as convert takes it, for the one of the two that is Linen's",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="an NNX model: the one of the two that is Linen's is converted for it, as by convert",
    )
    _command.add_input(parser)
    _command.add_kwarg(parser)
    _command.add_filter(parser)
    parser.add_argument("--rngs", action="store_true", help="compare RNG state too")


def _run(arguments: argparse.Namespace) -> int:
    from . import _comparison, _leaves, _output, _rules_file

    rules = _rules_file.load(arguments.rules) if arguments.rules else None
    contents = []
    with _output.working("comparing checkpoints") as progress:
        task = progress.add_task("reading", total=2)
        for path in (arguments.a, arguments.b):
            contents.append(_leaves.read(path))
            progress.advance(task)
        layouts = [content.layout for content in contents]
        if rules is not None or arguments.model is not None:
            contents = _in_one_layout(contents, rules, arguments)
        a, b = _named(contents, rngs=arguments.rngs)
        if arguments.filter is not None:
            a, b = (
                {p: v for p, v in x.items() if arguments.filter.search(_text(p))} for x in (a, b)
            )
        comparison = _comparison.compare(
            a,
            b,
            rtol=arguments.rtol,
            atol=arguments.atol,
            ignore_dtype=arguments.ignore_dtype,
        )
    document = _document((arguments.a, arguments.b), layouts, comparison)
    if arguments.json:
        _output.show_json(document)
    else:
        _output.show(*_renderables(document))
    return _command.OK if comparison.is_same else _command.FAILED


def _in_one_layout(contents: Any, rules: Any, arguments: argparse.Namespace) -> list[Any]:
    """Both checkpoints with NNX paths: the Linen one is renamed, or converted for a model."""
    from . import _conversion_plan, _leaves, _model, _rules_file, _target
    from ._input_errors import InputError

    linen = [n for n, content in enumerate(contents) if content.is_linen]
    if not linen:
        raise InputError(
            "--rules and --model",
            "two NNX checkpoints",
            "one of Linen's",
            "leave them out: paths are compared as they are",
        )
    which, rules = linen[0], rules or _rules_file.Rules()
    if arguments.model is None:
        conversion = _conversion_plan.by_rules(contents[which], rules, to_nnx=True)
    else:
        inputs = _target.parse_inputs(arguments.inputs)
        model = _model.abstract_values(arguments.model, inputs, dict(arguments.kwargs), to_nnx=True)
        conversion = _conversion_plan.against_model(contents[which], model, rules, to_nnx=True)
    renamed = list(contents)
    renamed[which] = _leaves.of_state(contents[which].layout, conversion.make())
    return renamed


def _named(contents: Any, *, rngs: bool) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
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


def _text(path: Path) -> str:
    return "/".join(map(str, path))


def _document(paths: tuple[str, str], layouts: Any, comparison: Any) -> dict[str, Any]:
    sides = [
        {"checkpoint": path, "layout": layout.layout, "format": layout.format}
        for path, layout in zip(paths, layouts, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "same": comparison.is_same,
        "a": sides[0],
        "b": sides[1],
        "equal": comparison.equal,
        "only_in_a": list(map(_text, comparison.only_a)),
        "only_in_b": list(map(_text, comparison.only_b)),
        "changed": [
            {
                "path": _text(difference.path),
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


def _renderables(document: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    from ._output import new_table, short_shape

    for side in ("a", "b"):
        entry = document[side]
        yield f"{side}: {entry['checkpoint']} (layout {entry['layout']}, {entry['format']})"
    rows = [
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
        # Most have no NaN at all.
        count = len(headings) if any(row[-1] for row in rows) else len(headings) - 1
        table = new_table(*headings[:count])
        for row in rows:
            table.add_row(*map(Text, row[:count]))
        yield table
        yield ""
    count = len(rows)
    yield f"{document['equal']:,} leaves are the same, {count:,} differ"


def _both(texts: Any) -> str:
    first, second = texts
    return first if first == second else f"{first} -> {second}"


def _nan_text(counts: Any) -> str:
    texts = (f"{count:,} in {side} only" for count, side in zip(counts, "ab", strict=True) if count)
    return ", ".join(texts)


def _size(value: float | str | None) -> str:
    return value or "" if isinstance(value, str | None) else f"{value:.3g}"


def _tolerance(text: str) -> float:
    return _command.number(text, "a number from 0 on", lambda x: 0 <= x < math.inf)
