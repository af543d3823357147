"""`python -m bridge rewrite`: Linen sources become NNX sources, and are proven the same."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Reads the source of a Linen model, runs the model once without computing anything, writes the same
model in NNX, gives both the same random weights and compares them. A class or layer that cannot be
rewritten stays Linen inside bridge.ToNNX, with the reason. By default no file is written: the
command shows the diff, the level of each class and the proof.

TARGET is package.module:name or path/to/file.py:name, as in report. With --discover, give a command
behind -- instead, such as that of your tests. It runs once, however long it takes, and each
outermost Linen model of this folder that it calls is rewritten. If the command fails, nothing is.

New files are put beside the old ones: models_nnx.py, and models_nnx.rules.toml for convert, parity
and bridge.port. --in-place changes the old files instead, all of them or none. It refuses, with
every reason, while a class of these files stays Linen or needs review, or while the rest of the
package makes one or calls its init or apply; --by-hand names the files where you change that
yourself.
"""

_EPILOG = """\
exit codes:
  0  every class is rewritten, and the program is proven; with --check: and the files are there
  1  a class stays Linen or needs review, or the program is not proven
  2  wrong usage, a model that cannot be run, or a command that fails or calls no model

examples:
  python -m bridge rewrite linen_models.py:make_net --input 2,4 --kwarg train=False
  python -m bridge rewrite linen_models.py:make_net --input 2,4 --kwarg train=False --write
  python -m bridge rewrite linen_models.py:make_net --input 2,4 --kwarg train=False \\
      --in-place --by-hand linen_models.py
  python -m bridge rewrite linen_models.py:make_net --input 2,4 --kwarg train=False \\
      --as-linen --write
  python -m bridge rewrite linen_models.py:make_net --model linen_models.py:make_wide --input 2,4
  python -m bridge rewrite --discover --as-linen --write -- python -m pytest tests

The JSON document is {"schema": "linen-nnx-bridge/rewrite", "version": 1, ...} with all that
bridge.rewrite.Rewrite.to_json gives.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `rewrite` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "rewrite",
        "rewrite Linen sources as NNX sources",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument(
        "target",
        nargs="*",
        metavar="TARGET",
        help="package.module:name or file.py:name; with --discover a command behind --",
    )
    parser.add_argument(
        "--discover",
        action="store_true",
        help="rewrite the Linen models of this folder that a command calls, with their inputs",
    )
    parser.add_argument(
        "--allow-failure",
        action="store_true",
        help="with --discover: use what was recorded before the command failed",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="TARGET",
        help="another model that reaches other branches, with the same inputs; once for each",
    )
    _command.add_call(parser)
    parser.add_argument(
        "--train",
        metavar="TARGET",
        help="a function that returns (state, train_step, batches): rewrite the training that it"
        " runs too",
    )
    parser.add_argument(
        "--keep-names", action="store_true", help="keep automatic names such as Dense_0"
    )
    parser.add_argument(
        "--only", action="append", metavar="CLASS", help="rewrite only this class; repeatable"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="CLASS", help="leave this class Linen"
    )
    writing = parser.add_mutually_exclusive_group()
    writing.add_argument("--write", action="store_true", help="write the new files and the rules")
    writing.add_argument(
        "--in-place",
        action="store_true",
        help="put the new classes into the old files, if nothing else of the package uses them",
    )
    writing.add_argument(
        "--check",
        action="store_true",
        help="only say whether --write would change anything",
    )
    parser.add_argument(
        "--as-linen",
        action="store_true",
        help="keep Linen classes of the same names in the old files, which run the new ones",
    )
    parser.add_argument(
        "--by-hand",
        action="append",
        default=[],
        metavar="FILE",
        help="with --in-place: a file that you change by hand; repeatable",
    )
    parser.add_argument(
        "--write-test",
        action="store_true",
        help="write a test too, which compares the two models",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that were not written by rewrite"
    )
    parser.add_argument(
        "--no-gradients", dest="gradients", action="store_false", help="do not compare gradients"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="do not compare other values of the fields: a class is proven only for these",
    )
    parser.add_argument("--no-diff", action="store_true", help="do not show the diff")
    parser.add_argument(
        "--html", type=_command.page, metavar="FILE", help="write the diff as a page, side by side"
    )


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _rewrite

    return _rewrite.rewritten(arguments)
