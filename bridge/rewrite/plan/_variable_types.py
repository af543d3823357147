"""The Variable types of collections, as text."""

from __future__ import annotations

_TYPES = {
    "params": "nnx.Param",
    "batch_stats": "nnx.BatchStat",
    "cache": "nnx.Cache",
    "intermediates": "nnx.Intermediate",
}


def type_text(collection: str) -> str:
    """The Variable type of a collection."""
    known = _TYPES.get(collection)
    return known or f'registry.current().type_from_name("{collection}", create=True)'
