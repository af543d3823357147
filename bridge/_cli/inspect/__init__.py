"""`python -m bridge inspect`: what a checkpoint holds, and who can read it."""

from __future__ import annotations

import argparse
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Shows the layout of a checkpoint and lists its leaves. Arrays are only read from a single file. With
--verify all arrays are read and compared with the digests that bridge.checkpoint saved with them.

layouts:
  bridge  written by bridge.checkpoint: Linen programs and NNX programs read it alike
  linen   variables by collection: {"params": {...}, "batch_stats": {...}}
  nnx     a state by path, without collections

formats:
  orbax    a directory that orbax wrote
  msgpack  a file that flax.serialization wrote
  safetensors, npz  a file of arrays by name; the keys of a path are joined by / or by dots

A file that holds only parameters, such as to_bytes(state.params), is read as Linen parameters;
--layout nnx reads it as an NNX state. The safetensors files of convert record their layout.
"latest" in place of a step is the newest one of a CheckpointManager or of
flax.training.checkpoints; an item of the step may follow, as in manager/latest/params.
"""

_EPILOG = """\
exit codes:
  0  the checkpoint was read, and with --verify no array is damaged
  2  wrong usage, no checkpoint that can be read, or arrays are damaged (--verify)

examples:
  python -m bridge inspect checkpoints/model
  python -m bridge inspect checkpoints/manager/100 --within model
  python -m bridge inspect model.msgpack --json > leaves.json
  python -m bridge inspect checkpoints/model --verify
  python -m bridge inspect checkpoints/manager/latest --within model

The JSON document is {"schema": "linen-nnx-bridge/checkpoint", "version": 1, "checkpoint": str,
"layout": str, "format": str, "written_by": "linen" | "nnx" | null, "extra": [str],
"collections": [{"name": str | null, "leaves": int, "elements": int, "bytes": int}],
"total": likewise without the name,
"leaves": [{"collection": str | null, "path": str, "shape": [int] | null, "dtype": str | null,
"bytes": int | null, "box": str | null}],
"verified": int | null}; the last is the number of arrays that have their digests, null without
--verify.
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `inspect` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "inspect",
        "show the layout and the leaves of a checkpoint",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory or file")
    _command.add_within(parser)
    _command.add_layout(parser)
    parser.add_argument("--verify", action="store_true", help="compare every array with its digest")


def _run(arguments: argparse.Namespace) -> _command.Result:
    from . import _inspect

    return _inspect.inspected(arguments)
