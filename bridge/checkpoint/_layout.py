"""Lists the leaves of a checkpoint, for those who look before they restore."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from bridge._conversion.neutral import Key, Path

from ._source import read_from


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """A leaf of a checkpoint.

    Attributes:
      collection: its collection, None if the checkpoint has none.
      path: its keys, without the collection.
      shape: the shape of its array; None if its value is empty or has several arrays.
      dtype: the dtype of its array as text; None as for `shape`.
      box: the full name of its metadata box, as for an import; None if it has no box, or if that is
        not known.
    """

    collection: str | None
    path: Path
    shape: tuple[int, ...] | None
    dtype: str | None
    box: str | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The contents of a checkpoint.

    Attributes:
      layout: `bridge` for a checkpoint of this package; else `linen` for variables by collection,
        `nnx` for a state by path.
      format: `orbax`, `msgpack`, `safetensors` or `npz`.
      leaves: the leaves of the model.
      extra: the names of the other trees.
      written_by: the side that a checkpoint of this package was saved from, `linen` or `nnx`.
    """

    layout: str
    format: str
    leaves: tuple[LeafLayout, ...]
    extra: tuple[str, ...]
    written_by: str | None = None


def layout(
    path: str | os.PathLike[str],
    *,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
) -> Layout:
    """Lists the contents of a checkpoint. Arrays are only read from a single file.

    Args:
      path: as for `restore`.
      within: as for `restore`.
      layout: as for `restore`.

    Returns:
      Its layout, format and leaves.

    Raises:
      CheckpointNotFoundError: there is no checkpoint.
      CheckpointError: it cannot be read.

    Example::

      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from bridge import checkpoint
      >>> path = pathlib.Path(tempfile.mkdtemp()) / 'model'
      >>> checkpoint.save(path, {'params': {'w': jnp.ones((2, 3))}})
      >>> found = checkpoint.layout(path)
      >>> found.layout, found.leaves[0].path, found.leaves[0].shape
      ('bridge', ('w',), (2, 3))
    """
    source = read_from(path, lambda source: source, within=within, layout=layout)
    leaves = []
    for record in source.variables:
        has_collection = source.layout != "nnx"
        single = next(iter(record.stored.values())) if record.form == 0 else None
        leaves.append(
            LeafLayout(
                collection=str(record.path[0]) if has_collection else None,
                path=record.path[1:] if has_collection else record.path,
                shape=single.shape if single else None,
                dtype=single.dtype if single else None,
                box=_public_name(record.box) if record.box else None,
            )
        )
    extra = tuple(source.extra)
    return Layout(source.layout, source.format, tuple(leaves), extra, source.written_by)


def _public_name(box: str) -> str:
    """The name of a box type as programs import it."""
    module, _, name = box.partition(":")
    if module.startswith("bridge._"):
        # This package's own are public in `bridge`, wherever they are defined.
        module = "bridge"
    return f"{module}.{name}"
