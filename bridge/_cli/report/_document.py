"""Holds a report as plain values: the JSON document, which the table shows too.

::

    {
        "schema": "linen-nnx-bridge/report",
        "version": 1,
        "target": str,
        "migrated": {
            "parameters": {
                "native": int,
                "total": int,
                "share": float,
                "native_bytes": int,
                "total_bytes": int,
            },
            "modules": {"native": int, "total": int, "share": float},
        },
        "modules": [  # each before its submodules
            {
                "path": str,  # keys joined by "/", "" for the model itself
                "name": str,
                "depth": int,  # the path's part below the parent; 0 for the model
                "class": str | null,  # null: not known, as the module was not seen running
                "kind": "linen" | "nnx" | "wrapped-linen" | "wrapped-nnx",
                "own": {"parameters": int, "bytes": int},
                "total": {"parameters": int, "bytes": int},  # submodules included
                "migrated": float,  # the share of these parameters in NNX modules
                "source": {"import_path": str, "file": str | null, "line": int | null} | null,
                "counterpart": {"exists": bool | null, "name": str | null},
            }
        ],
        "notes": [str],
        "check": {"min_migrated": float, "passed": bool} | null,  # what --min-migrated found
    }

`counterpart` is about Linen classes: `exists` is true for one that Flax ships and that has an NNX
class (`name`; for a part of a layer, such as the gates of an LSTM cell, the class of the layer's
counterpart), false for one that Flax ships and that has none, and null otherwise.
"""

from __future__ import annotations

from typing import Any

from ._nodes import Node, Size
from ._source import counterpart_of, import_path, is_part, source_of


def document_of(target: str, root: Node) -> dict[str, Any]:
    """The report on a tree.

    `target` is what the command line called the model.
    """
    # Containers (`nnx.List`, `nnx.Dict`) are not modules, and a wrapper and what it wraps are one.
    are_native = [node.kind.is_native for node in root.walk()]
    return {
        "target": target,
        "migrated": {
            "parameters": {
                "native": root.native.parameters,
                "total": root.total.parameters,
                "share": root.share,
                "native_bytes": root.native.bytes,
                "total_bytes": root.total.bytes,
            },
            "modules": {
                "native": sum(are_native),
                "total": len(are_native),
                "share": sum(are_native) / len(are_native),
            },
        },
        "modules": _modules(root, (), 0),
        "notes": notes_of(root),
        "check": None,
    }


def notes_of(root: Node) -> list[str]:
    """What keeps the figures from being the whole truth."""
    empty = ["/".join(node.path) or "the model" for node in root.walk() if node.is_empty]
    unknown = [node for node in root.walk() if node.cls is None]
    notes = []
    if empty:
        notes.append(
            f"no variables yet in the ToNNX at {', '.join(empty)}, so their parameters are not"
            " counted; give sample inputs, or call bridge.lazy_init where the model is made"
        )
    if unknown:
        notes.append(
            f"the classes of {len(unknown)} Linen modules are not known, as they were not seen"
            " running; give sample inputs"
        )
    return notes


def _modules(
    node: Node, above: tuple[str, ...], depth: int, around: type | None = None
) -> list[dict[str, Any]]:
    """The entries of a module and those below; `around` is the counterpart of the layer above."""
    counterpart = None if node.kind.is_native else counterpart_of(node.cls)
    if counterpart is False and around is not None and is_part(node.cls):
        counterpart = around
    entry = {
        "path": "/".join(node.path),
        "name": "/".join(node.path[len(above) :]),
        "depth": depth,
        "class": None if node.cls is None else _name(node.cls),
        "kind": str(node.kind),
        "own": _size(node.own),
        "total": _size(node.total),
        "migrated": node.share,
        "source": None if node.cls is None else source_of(node.cls)._asdict(),
        "counterpart": {
            "exists": counterpart if counterpart is None else bool(counterpart),
            "name": import_path(counterpart) if isinstance(counterpart, type) else None,
        },
    }
    inner = counterpart if isinstance(counterpart, type) else None
    below = (_modules(child, node.path, depth + 1, inner) for child in node.children)
    return [entry, *(row for rows in below for row in rows)]


def _name(cls: type) -> str:
    """A class's name with the classes around it, without the functions."""
    return cls.__qualname__.rpartition("<locals>.")[2]


def _size(size: Size) -> dict[str, int]:
    return {"parameters": size.parameters, "bytes": size.bytes}
