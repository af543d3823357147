"""`python -m bridge diff`: how two checkpoints differ, whatever their layouts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bridge._cli import _command
from bridge._conversion.neutral import Leaf, Path

_DESCRIPTION = """\
Compares two checkpoints of any layouts and formats leaf by leaf: paths that only one of them has,
shapes, dtypes, and the largest absolute and relative difference of values. Leaves are matched by
collection and path; by path alone if one of the two is an NNX state, which has no collections. RNG
state is left out unless --rngs is given. What lies beside the model, such as an optimizer's state,
is named, and compared only with --extra.
"""

_EPILOG = """\
exit codes:
  0  no difference
  1  the checkpoints differ, or one does not fit --model
  2  wrong usage, or one of them cannot be read

examples:
  python -m bridge diff before after
  python -m bridge diff before after --atol 1e-6 --rtol 1e-5 --ignore-dtype
  python -m bridge diff linen_checkpoint nnx_checkpoint --rules rules.toml
  python -m bridge diff linen_checkpoint nnx_checkpoint --model models.py:make_nnx
  python -m bridge diff before after --filter 'kernel$'
  python -m bridge diff before after --extra
  python -m bridge diff checkpoints/manager/100 checkpoints/manager/latest --within model
  python -m bridge diff model.msgpack checkpoints/model --json > difference.json

The JSON document is {"schema": "linen-nnx-bridge/diff", "version": 1, "same": bool,
"a": {"checkpoint": str, "layout": str, "format": str, "extra": [str]}, "b": likewise,
"extra_compared": bool, "equal": int,
"only_in_a": [str], "only_in_b": [str], "changed": [{"path": str, "what": ["structure" | "shape" |
"values" | "dtype"], "shapes": [[int] | null, [int] | null], "dtypes": [str | null, str | null],
"max_abs_difference": number | "inf" | null, "max_relative_difference": likewise,
"nan_in_one": [int, int]}]}; the last is how many elements are NaN in a alone, and in b alone.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `diff` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "diff",
        "compare two checkpoints of any layouts",
        _DESCRIPTION,
        _EPILOG,
        _run,
        _idle,
    )
    parser.add_argument("a", metavar="A", help="a checkpoint's directory or file")
    parser.add_argument("b", metavar="B", help="another one's")
    for name, meaning in (("--rtol", "relative to B"), ("--atol", "absolute")):
        parser.add_argument(
            name,
            type=_command.FROM_ZERO,
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
        type=_command.path,
        help="a table of paths as convert takes it, for the one of the two that is Linen's",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="an NNX model: the one of the two that is Linen's is converted for it, as by convert",
    )
    _command.add_within(parser, of=", in both")
    _command.add_within(parser, "--a-within", of=", in A alone")
    _command.add_within(parser, "--b-within", of=", in B alone")
    _command.add_layout(parser, "--a-layout", "--b-layout")
    _command.add_input(parser)
    _command.add_kwarg(parser)
    _command.add_filter(parser)
    parser.add_argument("--rngs", action="store_true", help="compare RNG state too")
    parser.add_argument(
        "--extra",
        action="store_true",
        help="compare the trees beside the model too, such as an optimizer's state and a step",
    )


def _idle(arguments: argparse.Namespace) -> Iterator[_command.Idle]:
    if arguments.model is None:
        yield "without --model", ["--input", "--kwarg"]


def _run(arguments: argparse.Namespace) -> int:
    from bridge._cli import _leaves, _output, _rules_file
    from bridge._cli._input_errors import SeveralInputsError, check_filter
    from bridge._errors import CheckpointError

    from . import _comparison, _text
    from ._text import document_path

    rules = _rules_file.load(arguments.rules)
    sides = (
        (arguments.a, arguments.a_within or arguments.within, arguments.a_layout),
        (arguments.b, arguments.b_within or arguments.within, arguments.b_layout),
    )
    contents, errors = [], []
    with _output.working("comparing checkpoints") as progress:
        task = progress.add_task("reading", total=2)
        for side in sides:
            try:
                contents.append(_leaves.read(*side))
            except CheckpointError as error:
                errors.append(error)
            progress.advance(task)
        if errors:
            raise errors[0] if len(errors) == 1 else SeveralInputsError(*errors)
        layouts = [content.layout for content in contents]
        if arguments.rules or arguments.model:
            contents = _in_one_layout(contents, rules, arguments)
        a, b = _named(contents, rngs=arguments.rngs)
        if arguments.extra:
            a |= _leaves.read_extra(*sides[0])
            b |= _leaves.read_extra(*sides[1])
        if (search := arguments.filter) is not None:
            paths = list(map(document_path, {**a, **b}))
            a, b = (
                {path: leaf for path, leaf in side.items() if search.search(document_path(path))}
                for side in (a, b)
            )
            check_filter(search, map(document_path, {**a, **b}), paths)
        comparison = _comparison.compare(
            a,
            b,
            rtol=arguments.rtol,
            atol=arguments.atol,
            ignore_dtype=arguments.ignore_dtype,
        )
    paths = arguments.a, arguments.b
    document = _text.document_of(paths, layouts, comparison, has_extra=arguments.extra)
    if arguments.json:
        _output.show_json("diff", document)
    else:
        _output.show(*_text.renderables(document))
    return _command.OK if comparison.is_same else _command.FAILED


def _in_one_layout(contents: Any, rules: Any, arguments: argparse.Namespace) -> list[Any]:
    """Both checkpoints with NNX paths: the Linen one is renamed, or converted for a model."""
    from bridge._cli import _conversion_plan, _leaves
    from bridge._cli._input_errors import InputError

    linen = [n for n, content in enumerate(contents) if content.is_linen]
    if len(linen) != 1:
        both, remedy = ("Linen's", "nnx") if linen else ("NNX's", "linen")
        raise InputError(
            "--rules and --model",
            f"two checkpoints that are {both}",
            "one of Linen's and one of NNX's",
            "leave them out: paths are compared as they are; or, if a checkpoint is taken for what"
            f" it is not, give --a-layout {remedy} or --b-layout {remedy}",
        )
    which = linen[0]
    conversion = _conversion_plan.conversion_of(
        contents[which], rules, arguments, to_nnx=True, other=contents[1 - which]
    )
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
