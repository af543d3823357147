"""`python -m bridge convert`: rewrites a checkpoint for the other library, or in another format."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Reads a checkpoint of any layout and writes its weights to OUT.

With --model, OUT is for that Linen or NNX model. Leaves are matched as by bridge.port.plan: Flax's
own layers by rules of their own (fused gates, stacked layers), the rest by --rules or by name, and
every leaf has to have its place. Without a model only the format changes.

--rules FILE is TOML:

  [rules]
  "encoder/Dense_0" = "encoder.fc1"  # expression for a Linen path = NNX path
  'block_(\\d+)' = 'blocks.\\1'

A rule holds for the path that it matches and all below it, in both directions. parity --suggest
prints the rules that two models need.

RNG state is left out, and so are trees beside the model, such as an optimizer's state and step; the
command names them. Only --format bridge keeps metadata boxes.

--overwrite replaces only a checkpoint: OUT must not hold any other file, nor be a link, the current
directory, CHECKPOINT, or a directory above one of these. A file has to be a safetensors file that
the bridge wrote. The old checkpoint stays until the new one is complete.
"""

_EPILOG = """\
exit codes:
  0  OUT was written, or would be (--dry-run)
  1  the checkpoint does not fit the model; nothing was written
  2  wrong usage, or something cannot be read or written

examples:
  python -m bridge convert linen_checkpoint nnx_checkpoint --model models.py:make_nnx --dry-run
  python -m bridge convert linen_checkpoint nnx_checkpoint --model models.py:make_nnx
  python -m bridge convert nnx_checkpoint model.safetensors \\
      --model models.py:make_linen --input 1,28,28,1
  python -m bridge convert linen_checkpoint model.safetensors

The JSON document is {"schema": "linen-nnx-bridge/convert", "version": 1, "written": bool,
"layout": "linen" | "nnx" (of the paths of OUT), "left_out": [str]}; with --model it has all that
bridge.port.Plan.to_json gives too.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `convert` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "convert",
        "rewrite a checkpoint for the other library, or in another format",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory or file")
    parser.add_argument("out", metavar="OUT", type=_command.path, help="what is written")
    _command.add_rules(parser, ", TOML; for --model")
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the model that reads OUT, package.module:name or file.py:name; see report --help",
    )
    _command.add_call(parser)
    parser.add_argument(
        "--format",
        choices=("orbax", "safetensors", "bridge"),
        help="orbax: what a program without the bridge writes itself; safetensors: arrays by name;"
        " bridge: what programs of both libraries read (default: safetensors if OUT ends so, else"
        " orbax)",
    )
    _command.add_within(parser)
    _command.add_layout(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint at OUT")


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _convert

    return _convert.converted(arguments)
