"""Writes a converted checkpoint: all of it, or nothing."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx
from flax.core import meta

from bridge import checkpoint
from bridge._cli._input_errors import InputError
from bridge._errors import CheckpointError
from bridge.checkpoint import _overwrite_guard, _publish, _save, _single_files
from bridge.checkpoint._stored import parts


def check_free(out: pathlib.Path, source: str, form: str, *, overwrite: bool) -> None:
    """Raises an error if there is something at `out` that may not be replaced.

    Args:
        out: what is to be written.
        source: the checkpoint that is read.
        form: as for `write`.
        overwrite: whether a checkpoint is replaced.
    """
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise InputError("OUT", f"something at {out}", "nothing there", "pass --overwrite")
    _overwrite_guard.check(out.absolute(), _file_format(form), [source])


def write(
    out: pathlib.Path, source: str, tree: Any, form: str, layout: str, *, overwrite: bool
) -> None:
    """Writes a tree, in the place of the checkpoint that is there.

    Args:
        out: a directory, or a file for the formats of one file.
        source: the checkpoint that was read, which is not replaced.
        tree: Linen variables or an NNX State.
        form: `orbax`, `msgpack`, `safetensors` or `npz` for the tree as programs without the
            bridge write it, with bare values; `bridge` for a checkpoint of `bridge.checkpoint`,
            which keeps boxes.
        layout: whose paths the tree has, `linen` or `nnx`.
        overwrite: whether a checkpoint is replaced.

    Raises:
        CheckpointError: what is at `out` is not replaced, the format cannot hold the tree, or
            writing fails; what was there is unchanged.
    """
    file_format = _file_format(form)
    with _publish.publishing(
        out, overwrite=overwrite, file_format=file_format, sources=[source]
    ) as new:
        if form == "bridge":
            checkpoint.save(new, tree)
        elif file_format:
            _single_files.write(new, _bare(tree), file_format, layout, out=out)
        else:
            _check_names(out, tree)
            # Programs save the State itself, as Flax's guide on checkpoints does.
            args = ocp.args.PyTreeSave(_unboxed(tree))
            _save.write(new, ocp.PyTreeCheckpointHandler(), args)


def mistaken_for(out: pathlib.Path, layout: str, form: str) -> str | None:
    """What a checkpoint that was written is read as, where that is not the layout it has.

    Plain msgpack and orbax have no place for the layout, which is then found out by the keys.

    Args:
        out: as for `write`.
        layout: as for `write`.
        form: as for `write`.
    """
    if form not in ("orbax", "msgpack"):
        return None
    found = checkpoint.layout(out).layout
    return found if found != layout else None


def _file_format(form: str) -> str | None:
    return form if form in _single_files.FORMATS else None


def _check_names(out: pathlib.Path, tree: Any) -> None:
    """Raises an error for two leaves that orbax would write to one place.

    Plain orbax joins the keys of a path by dots, so that `a.b` and `b` in `a` are one.
    """
    by_name: dict[str, list[str]] = {}
    for keys, _ in parts(_unboxed(tree)):
        texts = list(map(str, keys))
        by_name.setdefault(".".join(texts), []).append("/".join(texts))
    problems = [
        (path, f"orbax joins keys by '.', and so {name!r} is the name of {len(paths)} leaves")
        for name, paths in by_name.items()
        if len(paths) > 1
        for path in paths
    ]
    if problems:
        raise CheckpointError(
            "the format orbax cannot hold these leaves, for",
            out,
            "Choose --format bridge or msgpack.",
            unsupported=problems,
        )


def _bare(tree: Any) -> Any:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else _unboxed(tree)


def _unboxed(tree: Any) -> Any:
    return tree if isinstance(tree, nnx.State) else meta.unbox(tree)
