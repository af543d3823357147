"""`python -m bridge report`: how far a model's migration to NNX has come."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Shows every module of a model, including those inside each ToNNX and ToLinen (and those of
flax.nnx.bridge): its class and where that is defined, whether it is Linen, NNX or wrapped, its
parameters, and the NNX counterpart of a Linen layer of Flax. Then it shows the migrated share: how
much of the model is written in NNX, wrapped in a ToLinen or not.

TARGET is package.module:name or path/to/file.py:name. The name is a model, or a function or module
class that is called without arguments (an argument rngs is passed) and gives
  - an NNX module or a Linen module,
  - (module, *inputs), with sample inputs, or
  - {"model": module, "inputs": (...), "kwargs": {...}, "method": "name"}.
A Linen module makes its submodules when it sees inputs, so it needs sample inputs; so does a ToNNX
unless the function has called bridge.lazy_init. Everything runs under jax.eval_shape: no array is
allocated and no forward pass computed, unless TARGET asks for the values of arrays.
"""

_EPILOG = """\
exit codes:
  0  the report was made, and the share is as large as --min-migrated
  1  the share is smaller
  2  wrong usage, or TARGET gives no model

examples:
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1
  python -m bridge report bridge._demo._models:NnxOverLinenCNN --input 1,8,8,1 --html report.html
  python -m bridge report bridge._demo._models:NnxDigitsCNN --min-migrated 0.6
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1 --json > report.json

The JSON document is described in the docstring of bridge/_cli/report/_document.py.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `report` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "report",
        "show which modules of a model are Linen, NNX or wrapped, and the migrated share",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument("target", metavar="TARGET", help="package.module:name or file.py:name")
    _command.add_call(parser)
    parser.add_argument(
        "--html", metavar="FILE", type=_command.page, help="also write one self-contained page"
    )
    parser.add_argument(
        "--min-migrated",
        type=_command.SHARE,
        metavar="SHARE",
        help="exit with 1 if a smaller share of the parameters, from 0 to 1, is in NNX modules",
    )


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _report

    return _report.reported(arguments)
