"""`python -m bridge report`: how far a model's migration to NNX has come."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Shows every module of a model, across each ToNNX and ToLinen in it (those of flax.nnx.bridge too):
its class and where that is defined, whether it is Linen, NNX or wrapped, its parameters, and the
NNX class that stands for a Linen layer of Flax's. Then the migrated share: how much of the model is
written in NNX, wrapped in a ToLinen or not.

TARGET is package.module:name or path/to/file.py:name. The name is a model, or a function or module
class that is called without arguments (an argument rngs is passed) and gives
  - an NNX module or a Linen module,
  - (module, *inputs), with sample inputs, or
  - {"model": module, "inputs": (...), "kwargs": {...}, "method": "name"}.
A Linen module makes its submodules when it sees inputs, so it needs sample inputs; so does a ToNNX
unless the function has called bridge.lazy_init. Everything runs under jax.eval_shape: no array is
allocated and no forward pass computed.
"""

_EPILOG = """\
exit codes:
  0  the report was made, and --check passed
  1  --check failed
  2  wrong usage, or TARGET gives no model

examples:
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1
  python -m bridge report bridge._demo._models:NnxOverLinenCNN --input 1,8,8,1 --html report.html
  python -m bridge report bridge._demo._models:NnxDigitsCNN --check --min-migrated 0.6
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1 --json > report.json

The JSON document is described in the docstring of bridge/_cli/_document.py.
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
        _idle,
    )
    parser.add_argument("target", metavar="TARGET", help="package.module:name or file.py:name")
    _command.add_input(parser)
    _command.add_kwarg(parser)
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=_command.path,
        help="also write one self-contained page, in the place of an earlier one if it is there",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if the share is below --min-migrated",
    )
    parser.add_argument(
        "--min-migrated",
        type=_command.SHARE,
        metavar="SHARE",
        help="the share for --check, from 0 to 1",
    )
    parser.add_argument(
        "--by",
        choices=("parameters", "modules"),
        default="parameters",
        help="which of the two shares --check looks at (default: %(default)s)",
    )
    parser.add_argument(
        "--concrete",
        action="store_true",
        help="run TARGET with real arrays, for one that needs their values",
    )


def _idle(arguments: argparse.Namespace) -> Iterator[_command.Idle]:
    if not arguments.check:
        yield "without --check", ["--by"]


def _run(arguments: argparse.Namespace) -> int:
    from bridge._cli import _output, _target
    from bridge._cli._input_errors import InputError, check_page

    from . import _document, _html, _page, _text, _traced

    if arguments.check != (arguments.min_migrated is not None):
        raise InputError(
            "--check",
            "one without the other",
            "--check and --min-migrated together",
            "give both, as in --check --min-migrated 0.6",
        )
    if arguments.html is not None:
        check_page(arguments.html, _page.MARK)
    inputs = _target.parse_inputs(arguments.inputs)
    with _output.working(f"tracing {arguments.target}"):
        kwargs = dict(arguments.kwargs)
        root = _traced.tree(arguments.target, inputs, kwargs, concrete=arguments.concrete)
    document = _document.document_of(arguments.target, root)
    if arguments.check:
        if any(node.is_empty for _, node in root.walk()):
            raise InputError(
                arguments.target,
                document["notes"][0],
                "a model whose parameters are all known, for --check",
                "the share would leave them out",
            )
        share = document["migrated"][arguments.by]["share"]
        document["check"] = {
            "by": arguments.by,
            "min_migrated": arguments.min_migrated,
            "share": share,
            "passed": share >= arguments.min_migrated,
        }
    if arguments.html is not None:
        arguments.html.write_text(_html.page(document), encoding="utf-8")
    if arguments.json:
        _output.show_json("report", document)
    else:
        _output.show(*_text.renderables(document))
    passed = document["check"] is None or document["check"]["passed"]
    return _command.OK if passed else _command.FAILED
