"""`python -m bridge parity`: whether two models do the same, and the first layer that does not."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Compares two models with the same weights, as bridge.parity.check does: weights, outputs, the output
of every layer, gradients, updated state and partition specs. It names the first layer that differs.

A and B are TARGETs, as in report: package.module:name or path/to/file.py:name. Here they are made
with values. The variables of a Linen model are those under the key "variables" of the dict that
TARGET returns, or else those of its init. With --port, B first gets the values of A by bridge.port,
with --rules for leaves with other names. --suggest only prints the rules that this needs, as
Python and as TOML, with the evidence for each.

Inputs are those that A gives, or --input: random numbers of that shape, 0 or 1 for integers. A
model that does not take a --kwarg runs without it. Further settings, such as the size of a named
axis, are fields of bridge.parity.Options.

The models run as in evaluation, where a missing dropout or another rate changes no number. Such
differences of static fields are listed and do not fail the check, unless --sections names them:
--sections outputs,layers,fields.
"""

_EPILOG = """\
exit codes:
  0  the models do the same
  1  they differ, or the values of A do not fit B (--port, --suggest)
  2  wrong usage, or a TARGET that gives no model or that fails

examples:
  python -m bridge parity models.py:make_linen models.py:make_nnx --input 2,4 --port
  python -m bridge parity models.py:make_linen models.py:make_nnx --input 2,4 --suggest
  python -m bridge parity models.py:make_linen models.py:make_nnx --input 2,4 --port --no-gradients
  python -m bridge parity models.py:make_nnx models.py:make_nnx --input 2,4 --json > parity.json
  python -m bridge parity models.py:make_nnx models.py:make_nnx --input 2,4 --train --rngs dropout=0
  python -m bridge parity models.py:make_nnx models.py:make_nnx --input 2,4 \\
      --sections outputs,layers,fields

The JSON document is {"schema": "linen-nnx-bridge/parity", "version": 1, ...} with all that
bridge.parity.Report.to_json gives.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `parity` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "parity",
        "compare two models layer by layer",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument("a", metavar="A", help="the reference, package.module:name or file.py:name")
    parser.add_argument("b", metavar="B", help="the model that is compared with it")
    _command.add_call(parser)
    _command.add_rules(parser, " as convert takes it")
    parser.add_argument(
        "--port", action="store_true", help="give B the values of A before they are compared"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="print the rules that --port needs with the evidence, and compare nothing",
    )
    parser.add_argument("--train", action="store_true", help="run both models as in training")
    parser.add_argument(
        "--rngs",
        action="append",
        type=_command.named("NAME=SEED, such as dropout=0, from 0 on", _command.COUNT),
        default=[],
        metavar="NAME=SEED",
        help="the key of a stream of both models, such as dropout=0; once for each",
    )
    parser.add_argument(
        "--sections",
        metavar="NAMES",
        type=_names,
        help="what is compared, joined by commas: port plan, weights, outputs, layers, fields,"
        " gradients, state, steps, partition specs (default: all of them, where fields do not"
        " count and steps need --steps)",
    )
    parser.add_argument(
        "--steps", type=_command.COUNT, default=0, metavar="N", help="optimizer steps too"
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        type=_command.named("DTYPE=RTOL, such as float32=1e-4", _command.FROM_ZERO),
        default=[],
        metavar="DTYPE=RTOL",
        help="how far values of a dtype may differ, such as float32=1e-4; once for each",
    )
    parser.add_argument(
        "--no-gradients", dest="gradients", action="store_false", help="leave out gradients"
    )


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _parity

    return _parity.compared(arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
