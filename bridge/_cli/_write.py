"""Writes a converted checkpoint: all of it, or nothing."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx, serialization
from flax.core import meta

from bridge import checkpoint
from bridge.checkpoint import CheckpointError

from ._input_errors import InputError


def check_free(out: pathlib.Path, *, overwrite: bool) -> None:
    """Raises InputError if there is something at `out` that may not be replaced."""
    if not out.exists():
        return
    if not overwrite:
        raise InputError("OUT", f"something at {out}", "nothing there", "pass --overwrite")
    if out.is_dir():
        try:
            checkpoint.layout(out)
        except CheckpointError as error:
            # A wrong path must not cost a directory of other things.
            found = f"a directory that is no checkpoint at {out}"
            raise InputError("OUT", found, "a checkpoint to replace", "remove it first") from error


def write(out: pathlib.Path, tree: Any, form: str) -> None:
    """Writes a tree, in the place of what is there.

    Args:
        out: a directory, or a file for msgpack.
        tree: Linen variables or an NNX State.
        form: `orbax` or `msgpack` for the tree as programs without the bridge write it, with bare
            values; `bridge` for a checkpoint of `bridge.checkpoint`, which keeps boxes.
    """
    out = out.absolute()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        new = pathlib.Path(place) / out.name
        if form == "bridge":
            checkpoint.save(new, tree)
        elif form == "msgpack":
            new.write_bytes(serialization.to_bytes(_bare(tree)))
        else:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                # Programs save the State itself, as Flax's guide on checkpoints does.
                checkpointer.save(new, args=ocp.args.PyTreeSave(_unboxed(tree)))
        # What was there is gone only when the new one is complete.
        if out.exists():
            out.rename(pathlib.Path(place) / "replaced")
        new.rename(out)


def _bare(tree: Any) -> Any:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else _unboxed(tree)


def _unboxed(tree: Any) -> Any:
    return tree if isinstance(tree, nnx.State) else meta.unbox(tree)
