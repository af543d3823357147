"""`python -m bridge inspect`: what a checkpoint holds, and who can read it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

from . import _command

_DESCRIPTION = """\
Tells the layout of a checkpoint, and lists its leaves. No array is read, but from a msgpack file,
which has no index. With --verify all arrays are read and compared with the digests that
bridge.checkpoint saved with them.

layouts:
  bridge  written by bridge.checkpoint: Linen programs and NNX programs read it alike
  linen   variables by collection: {"params": {...}, "batch_stats": {...}}
  nnx     a state by path, without collections

formats:
  orbax    a directory that orbax wrote
  msgpack  a file that flax.serialization wrote
"""

_EPILOG = """\
exit codes:
  0  the checkpoint was read
  1  arrays are damaged (--verify)
  2  wrong usage, or there is no checkpoint that can be read

examples:
  python -m bridge inspect checkpoints/model
  python -m bridge inspect checkpoints/manager/100 --within model
  python -m bridge inspect model.msgpack --json > leaves.json
  python -m bridge inspect checkpoints/model --verify

The JSON document is {"schema": "linen-nnx-bridge/checkpoint", "version": 1, "checkpoint": str,
"layout": str, "format": str, "written_by": "linen" | "nnx" | null, "extra": [str],
"collections": [{"name": str | null, "leaves": int, "elements": int, "bytes": int}],
"total": {"leaves": int, "elements": int, "bytes": int},
"leaves": [{"collection": str | null, "path": str, "shape": [int] | null, "dtype": str | null,
"bytes": int | null, "box": str | null}],
"verified": int | null, "damaged": [{"path": str, "reason": str}]}; "verified" is the number of
arrays that have their digests, null without --verify and if any is damaged.
"""

SCHEMA = "linen-nnx-bridge/checkpoint"
VERSION = 1


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
    parser.add_argument("--verify", action="store_true", help="compare every array with its digest")


def _run(arguments: argparse.Namespace) -> int:
    from bridge import checkpoint

    from . import _output

    with _output.working(f"reading {arguments.checkpoint}"):
        layout = checkpoint.layout(arguments.checkpoint, within=arguments.within)
        verified, damaged = _verify(arguments.checkpoint) if arguments.verify else (None, [])
    document = {
        **_document(arguments.checkpoint, layout),
        "verified": verified,
        "damaged": [{"path": path, "reason": reason} for path, reason in damaged],
    }
    if arguments.json:
        _output.show_json(document)
    else:
        _output.show(*_renderables(document))
    return _command.FAILED if damaged else _command.OK


def _verify(path: str) -> tuple[int | None, tuple[tuple[str, str], ...]]:
    """How many arrays are what was saved, and which are not."""
    from bridge import checkpoint

    try:
        return checkpoint.verify(path), ()
    except checkpoint.CheckpointError as error:
        if not error.unreadable:
            raise
        return None, error.unreadable


def _document(path: str, layout: Any) -> dict[str, Any]:
    leaves = [_leaf(leaf) for leaf in layout.leaves]
    # In a state by path, what is beside the model cannot be told from it.
    extra = () if layout.layout == "nnx" else layout.extra
    collections: dict[str | None, list[dict[str, Any]]] = {}
    for leaf in leaves:
        collections.setdefault(leaf["collection"], []).append(leaf)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "checkpoint": path,
        "layout": layout.layout,
        "format": layout.format,
        "written_by": layout.written_by,
        "extra": list(extra),
        "collections": [{"name": name, **_sum(own)} for name, own in collections.items()],
        "total": _sum(leaves),
        "leaves": leaves,
    }


def _leaf(leaf: Any) -> dict[str, Any]:
    from ._leaves import item_bytes

    width = item_bytes(leaf.dtype)
    return {
        "collection": leaf.collection,
        "path": "/".join(map(str, leaf.path)),
        "shape": None if leaf.shape is None else list(leaf.shape),
        "dtype": leaf.dtype,
        "bytes": None if leaf.shape is None or width is None else width * math.prod(leaf.shape),
        "box": leaf.box,
    }


def _sum(leaves: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "leaves": len(leaves),
        "elements": sum(math.prod(leaf["shape"]) for leaf in leaves if leaf["shape"] is not None),
        "bytes": sum(leaf["bytes"] or 0 for leaf in leaves),
    }


def _renderables(document: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    from ._output import byte_text, new_table, shape_text

    written = f", saved from {document['written_by']}" if document["written_by"] else ""
    yield f"{document['checkpoint']}: layout {document['layout']}, {document['format']}{written}"
    yield ""
    table = new_table("collection", "path", "shape", "dtype", "bytes", "box", right=("bytes",))
    for leaf in document["leaves"]:
        size = "" if leaf["bytes"] is None else byte_text(leaf["bytes"])
        cells = (leaf["collection"] or "", leaf["path"], shape_text(leaf["shape"]))
        table.add_row(*map(Text, (*cells, leaf["dtype"] or "", size, leaf["box"] or "")))
    yield table
    yield ""
    headings = ("leaves", "elements", "bytes")
    totals = new_table("collection", *headings, right=headings)
    for entry in (*document["collections"], {"name": "total", **document["total"]}):
        totals.add_row(
            Text(entry["name"] or "(none)"),
            f"{entry['leaves']:,}",
            f"{entry['elements']:,}",
            byte_text(entry["bytes"]),
        )
    yield totals
    if document["extra"]:
        yield ""
        yield f"beside the model: {', '.join(document['extra'])}"
    if document["damaged"]:
        yield ""
        found = new_table("damaged", "what was found")
        for entry in document["damaged"]:
            found.add_row(Text(entry["path"]), Text(entry["reason"]))
        yield found
    elif document["verified"] is not None:
        yield ""
        yield f"verified: all {document['verified']:,} arrays have the digests they were saved with"
