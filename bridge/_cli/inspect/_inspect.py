"""The leaves of a checkpoint, as a JSON document and as a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bridge import checkpoint
from bridge._cli import _checkpoints
from bridge._cli._output import Result, byte_text, new_table, short_shape
from bridge.checkpoint import LeafLayout
from bridge.checkpoint._source import Source, read_from

_COLUMNS = ("collection", "path", "shape", "dtype", "bytes", "box")
_COUNTS = ("leaves", "elements")


def inspected(arguments: argparse.Namespace) -> Result:
    """Tells what a checkpoint holds.

    Raises CheckpointError if it cannot be read, or if arrays are damaged, with `--verify`.
    """
    path = arguments.checkpoint
    layout = checkpoint.layout(path, within=arguments.within, layout=arguments.layout)
    verified = checkpoint.verify(path) if arguments.verify else None
    if layout.layout == "bridge":
        # Nothing in the list of leaves shows that the arrays cannot be opened.
        read_from(path, Source.check_arrays)
    leaves = [*map(_leaf, _checkpoints.listed(layout))]
    names = dict.fromkeys(leaf["collection"] for leaf in leaves)
    document = {
        "checkpoint": path,
        "layout": layout.layout,
        "format": layout.format,
        "written_by": layout.written_by,
        "extra": [*_checkpoints.beside(layout)],
        "collections": [
            {"name": name, **_sum([leaf for leaf in leaves if leaf["collection"] == name])}
            for name in names
        ],
        "total": _sum(leaves),
        "leaves": leaves,
        "verified": verified,
    }
    return Result("checkpoint", document, _shown(document))


def _leaf(leaf: LeafLayout) -> dict[str, Any]:
    width = _item_bytes(leaf.dtype)
    return {
        "collection": leaf.collection,
        "path": _checkpoints.text_of(leaf.path),
        "shape": None if leaf.shape is None else list(leaf.shape),
        "dtype": leaf.dtype,
        "bytes": None if leaf.shape is None or width is None else width * math.prod(leaf.shape),
        "box": leaf.box,
    }


def _item_bytes(dtype: str | None) -> int | None:
    """Bytes of one element; None for what has no fixed size, such as PRNG keys and strings."""
    try:
        return None if dtype is None else np.dtype(dtype).itemsize
    except TypeError:
        return None


def _sum(leaves: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {
        "leaves": len(leaves),
        "elements": sum(math.prod(leaf["shape"]) for leaf in leaves if leaf["shape"] is not None),
        "bytes": sum(leaf["bytes"] or 0 for leaf in leaves),
    }


def _shown(document: Mapping[str, Any]) -> Iterator[Any]:
    written = f", saved from {document['written_by']}" if document["written_by"] else ""
    yield f"{document['checkpoint']}: layout {document['layout']}, {document['format']}{written}"
    yield ""
    if document["leaves"]:
        yield new_table(_COLUMNS, map(_row, document["leaves"]), right=("bytes",))
        yield ""
    totals = (*document["collections"], {"name": "total", **document["total"]})
    yield new_table(
        ("collection", *_COUNTS, "bytes"),
        [
            (
                each["name"] or "(none)",
                *(f"{each[name]:,}" for name in _COUNTS),
                byte_text(each["bytes"]),
            )
            for each in totals
        ],
        right=(*_COUNTS, "bytes"),
    )
    if document["extra"]:
        yield ""
        yield f"beside the model: {', '.join(document['extra'])}"
    if document["verified"] is not None:
        yield ""
        yield f"verified: all {document['verified']:,} arrays have the digests they were saved with"


def _row(leaf: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        leaf["collection"] or "",
        leaf["path"],
        short_shape(leaf["shape"]),
        leaf["dtype"] or "",
        "" if leaf["bytes"] is None else byte_text(leaf["bytes"]),
        leaf["box"] or "",
    )
