"""`python -m bridge diff`: how two checkpoints differ, whatever their layouts."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Compares two checkpoints of any layouts and formats leaf by leaf: paths that only one of them has,
shapes, dtypes, and the largest difference of values, absolute and relative to the largest magnitude
in A. Leaves are matched by collection and path, or only by path if one of the two is an NNX state,
which has no collections. RNG state is left out unless --rngs is given. Trees beside the model, such
as an optimizer's state, are named and not compared.

With --model, the Linen checkpoint of the two is converted for that NNX model, as by convert.
"""

_EPILOG = """\
exit codes:
  0  no difference
  1  the checkpoints differ, or one does not fit --model
  2  wrong usage, or one of them cannot be read

examples:
  python -m bridge diff before after
  python -m bridge diff before after --atol 1e-6 --rtol 1e-5 --ignore-dtype
  python -m bridge diff linen_checkpoint nnx_checkpoint --model models.py:make_nnx
  python -m bridge diff checkpoints/manager/100 checkpoints/manager/latest --within model
  python -m bridge diff model.msgpack checkpoints/model --json > difference.json

The JSON document is {"schema": "linen-nnx-bridge/diff", "version": 1, "same": bool,
"a": {"checkpoint": str, "layout": str, "format": str, "extra": [str]}, "b": likewise,
"equal": int, "differences": [{"path": str, "difference": str,
"shapes": [[int] | null, [int] | null], "dtypes": [str | null, str | null],
"max_abs": number | null, "max_rel": number | null}]}; null is also for what is not finite.
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
    )
    parser.add_argument("a", metavar="A", help="a checkpoint's directory or file")
    parser.add_argument("b", metavar="B", help="another one's")
    for name, meaning in (
        ("--rtol", "relative to the largest magnitude in A"),
        ("--atol", "absolute"),
    ):
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
    _command.add_rules(parser, " as convert takes it, for --model")
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the NNX model that the one of the two that is Linen's is converted for",
    )
    _command.add_within(parser, of=", in both")
    _command.add_within(parser, "--a-within", of=", only in A")
    _command.add_within(parser, "--b-within", of=", only in B")
    _command.add_layout(parser, "--a-layout", "--b-layout")
    _command.add_call(parser)
    parser.add_argument("--rngs", action="store_true", help="compare RNG state too")


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _diff

    return _diff.compared(arguments)
