"""`python -m bridge inspect`: what a checkpoint holds, and who can read it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Tells the layout of a checkpoint, and lists its leaves. No array is read, but from a single file.
With --stats all arrays are read, and with --verify they are compared with the digests that
bridge.checkpoint saved with them.

layouts:
  bridge  written by bridge.checkpoint: Linen programs and NNX programs read it alike
  linen   variables by collection: {"params": {...}, "batch_stats": {...}}
  nnx     a state by path, without collections

formats:
  orbax    a directory that orbax wrote
  msgpack  a file that flax.serialization wrote
  safetensors, npz  a file of arrays by name; the keys of a path are joined by / or by dots

A file of parameters alone, such as to_bytes(state.params), is read as Linen's; --layout nnx reads
it as an NNX state. Files of safetensors and npz by convert say what they are. "latest" in the
place of a step is the newest one of a CheckpointManager or of flax.training.checkpoints; an item
of the step may follow, as in manager/latest/params.
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
  python -m bridge inspect checkpoints/manager/latest --within model --summary
  python -m bridge inspect model.msgpack --stats --filter 'kernel$'

The JSON document is {"schema": "linen-nnx-bridge/checkpoint", "version": 1, "checkpoint": str,
"layout": str, "format": str, "written_by": "linen" | "nnx" | null, "extra": [str],
"collections": [{"name": str | null, "leaves": int, "elements": int, "bytes": int,
"nan": int, "infinite": int}], "total": likewise without the name (the last two with --stats),
"leaves": [{"collection": str | null, "path": str, "shape": [int] | null, "dtype": str | null,
"bytes": int | null, "box": str | null, "statistics": {"min": number | null, "max": likewise,
"mean": likewise, "std": likewise, "nan": int, "infinite": int} | null (with --stats)}],
"verified": int | null, "damaged": [{"path": str, "reason": str}]}; "verified" is the number of
arrays that have their digests, null without --verify and if any is damaged.
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
    _command.add_filter(parser)
    parser.add_argument(
        "--summary", action="store_true", help="only what the collections hold, not each leaf"
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="read the arrays: smallest, largest, mean, deviation, and counts of NaN and infinity",
    )
    parser.add_argument("--verify", action="store_true", help="compare every array with its digest")


def _run(arguments: argparse.Namespace) -> int:
    from bridge import checkpoint
    from bridge._cli import _output

    with _output.working(f"reading {arguments.checkpoint}"):
        layout = checkpoint.layout(
            arguments.checkpoint, within=arguments.within, layout=arguments.layout
        )
        if layout.layout == "bridge" and not arguments.verify:
            # Nothing in the list of leaves shows that the arrays cannot be opened.
            _check_arrays(arguments.checkpoint)
        statistics = _statistics(arguments) if arguments.stats else {}
        verified, damaged = _verify(arguments.checkpoint) if arguments.verify else (None, [])
    document = {
        **_document(arguments, layout, statistics),
        "verified": verified,
        "damaged": [{"path": path, "reason": reason} for path, reason in damaged],
    }
    if arguments.json:
        _output.show_json("checkpoint", document)
    else:
        _output.show(*_renderables(document))
    return _command.FAILED if damaged else _command.OK


def _check_arrays(path: str) -> None:
    """Raises CheckpointError if the arrays of a checkpoint of the bridge cannot be opened."""
    from bridge.checkpoint._source import Source, read_from

    def check(source: Source) -> None:
        for item in (source.variables, *source.extra.values()):
            item.check()

    read_from(path, check)


def _verify(path: str) -> tuple[int | None, tuple[tuple[str, str], ...]]:
    """How many arrays are what was saved, and which are not."""
    from bridge import checkpoint

    try:
        return checkpoint.verify(path), ()
    except checkpoint.CheckpointError as error:
        if not error.unreadable:
            raise
        return None, error.unreadable


def _statistics(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of each leaf by its path."""
    from bridge._cli import _leaves

    from ._statistics import statistics_of

    contents = _leaves.read(arguments.checkpoint, arguments.within, arguments.layout)
    return {
        "/".join(text for text in (collection, *path) if text): statistics_of(leaf.value)
        for (collection, path), leaf in contents.by_address().items()
    }


def _document(
    arguments: argparse.Namespace, layout: Any, statistics: Mapping[str, Any]
) -> dict[str, Any]:
    from bridge._cli._input_errors import check_filter
    from bridge._cli._leaves import listed

    leaves = [_leaf(leaf, statistics) for leaf in listed(layout)]
    if arguments.filter is not None:
        paths = [_full_path(leaf) for leaf in leaves]
        leaves = [leaf for leaf in leaves if arguments.filter.search(_full_path(leaf))]
        check_filter(arguments.filter, map(_full_path, leaves), paths)
    # A state by path does not show which entries lie beside the model.
    extra = () if layout.layout == "nnx" else layout.extra
    collections: dict[str | None, list[dict[str, Any]]] = {}
    for leaf in leaves:
        collections.setdefault(leaf["collection"], []).append(leaf)
    return {
        "checkpoint": arguments.checkpoint,
        "layout": layout.layout,
        "format": layout.format,
        "written_by": layout.written_by,
        "extra": list(extra),
        "collections": [{"name": name, **_sum(own)} for name, own in collections.items()],
        "total": _sum(leaves),
        "leaves": [] if arguments.summary else leaves,
    }


def _full_path(leaf: Mapping[str, Any]) -> str:
    return "/".join(text for text in (leaf["collection"], leaf["path"]) if text)


def _leaf(leaf: Any, statistics: Mapping[str, Any]) -> dict[str, Any]:
    from bridge._cli._leaves import item_bytes

    width = item_bytes(leaf.dtype)
    entry = {
        "collection": leaf.collection,
        "path": "/".join(map(str, leaf.path)),
        "shape": None if leaf.shape is None else list(leaf.shape),
        "dtype": leaf.dtype,
        "bytes": None if leaf.shape is None or width is None else width * math.prod(leaf.shape),
        "box": leaf.box,
    }
    if not statistics:
        return entry
    return {**entry, "statistics": statistics.get(_full_path(entry))}


def _sum(leaves: list[dict[str, Any]]) -> dict[str, Any]:
    figures = [leaf["statistics"] for leaf in leaves if leaf.get("statistics") is not None]
    names = ("nan", "infinite") if figures else ()
    return {
        "leaves": len(leaves),
        "elements": sum(math.prod(leaf["shape"]) for leaf in leaves if leaf["shape"] is not None),
        "bytes": sum(leaf["bytes"] or 0 for leaf in leaves),
        **{name: sum(each[name] for each in figures) for name in names},
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _renderables(document: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    from bridge._cli._output import byte_text, new_table, short_shape
    from bridge._errors import by_reason

    written = f", saved from {document['written_by']}" if document["written_by"] else ""
    yield f"{document['checkpoint']}: layout {document['layout']}, {document['format']}{written}"
    yield ""
    has_figures = "nan" in document["total"]
    figures = ("min", "max", "mean", "std", "nan", "infinite") if has_figures else ()
    columns = ("collection", "path", "shape", "dtype", "bytes", "box", *figures)
    table = new_table(*columns, right=("bytes", *figures))
    for leaf in document["leaves"]:
        size = "" if leaf["bytes"] is None else byte_text(leaf["bytes"])
        cells = (leaf["collection"] or "", leaf["path"], short_shape(leaf["shape"]))
        own = leaf.get("statistics") or {}
        numbers = (_number(own.get(name)) for name in figures)
        table.add_row(*map(Text, (*cells, leaf["dtype"] or "", size, leaf["box"] or "", *numbers)))
    if document["leaves"]:
        yield table
        yield ""
    counts = ("leaves", "elements", *(("nan", "infinite") if has_figures else ()))
    totals = new_table("collection", *counts, "bytes", right=(*counts, "bytes"))
    for entry in (*document["collections"], {"name": "total", **document["total"]}):
        totals.add_row(
            Text(entry["name"] or "(none)"),
            *(f"{entry.get(name, 0):,}" for name in counts),
            byte_text(entry["bytes"]),
        )
    yield totals
    if document["extra"]:
        yield ""
        yield f"beside the model: {', '.join(document['extra'])}"
    if document["damaged"]:
        yield ""
        found = new_table("damaged", "what was found")
        for names, reason in by_reason((e["path"], e["reason"]) for e in document["damaged"]):
            found.add_row(Text(names), Text(reason))
        yield found
    elif document["verified"] is not None:
        yield ""
        yield f"verified: all {document['verified']:,} arrays have the digests they were saved with"
