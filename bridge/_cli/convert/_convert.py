"""Writes a converted checkpoint: all of it, or nothing."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx
from flax.core import meta

from bridge import checkpoint
from bridge._cli import _checkpoints, _conversion, _rules_file
from bridge._cli._input_errors import InputError
from bridge._cli._output import new_table
from bridge._cli._result import Result
from bridge._errors import CheckpointError
from bridge.checkpoint import _publish, _save, _single_files
from bridge.checkpoint._stored import parts


def converted(arguments: argparse.Namespace) -> Result:
    """Plans the conversion, and writes what comes of it.

    Raises InputError if OUT is missing. Raises CheckpointError if CHECKPOINT cannot be read, what
    is at OUT is not replaced, the format cannot hold the values, or writing fails; what was there
    is then unchanged.
    """
    if arguments.out is None:
        raise InputError("OUT", "nothing", "what is to be written", "give a path")
    rules = _rules_file.load(arguments.rules)
    contents = _checkpoints.read(arguments.checkpoint, arguments.within, arguments.layout)
    conversion = _conversion.conversion_of(contents, rules, arguments)
    layout = "nnx" if conversion.to_nnx else "linen"
    form = arguments.format or (
        "safetensors" if arguments.out.suffix == ".safetensors" else "orbax"
    )
    writes = conversion.ok and not arguments.dry_run
    if writes:
        arguments.tell(f"writing {arguments.out}")
        _write(arguments, conversion.make(), form, layout)
    document = {"written": writes, "layout": layout, "left_out": [*contents.left_out]}
    shown = [*_plan(conversion, arguments), ""]
    if contents.left_out:
        shown.append(f"left out, as it is not a weight: {', '.join(contents.left_out)}")
    if writes:
        shown.append(f"written: {arguments.out} (layout {layout}, {form})")
    elif conversion.ok:
        shown.append("nothing was written (--dry-run)")
    else:
        shown.append(
            "nothing was written: the checkpoint does not fit the model; --suggest proposes rules,"
            " and fused gates of an NNX checkpoint need --source-model"
        )
    return Result("convert", {**document, **conversion.to_json()}, shown, conversion.ok)


def _plan(conversion: _conversion.Conversion, arguments: argparse.Namespace) -> Iterator[Any]:
    if conversion.plan is not None:
        yield str(conversion.plan)
    else:
        rows = [(", ".join(sources), target) for sources, target in conversion.moves]
        yield new_table((arguments.checkpoint, arguments.out.name), rows)


def _write(arguments: argparse.Namespace, tree: Any, form: str, layout: str) -> None:
    """Writes Linen variables or an NNX State, in the place of the checkpoint that is there."""
    out, is_file = arguments.out, form == "safetensors"
    with _publish.publishing(
        out,
        overwrite=arguments.overwrite,
        file_format=form if is_file else None,
        sources=[arguments.checkpoint],
    ) as new:
        if form == "bridge":
            checkpoint.save(new, tree)
        elif is_file:
            bare = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else meta.unbox(tree)
            _single_files.write(new, bare, layout, out=out)
        else:
            # Programs save the State itself, as Flax's guide on checkpoints does.
            bare = tree if isinstance(tree, nnx.State) else meta.unbox(tree)
            _check_names(out, bare)
            _save.write(new, ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave(bare))


def _check_names(out: pathlib.Path, tree: Any) -> None:
    """Raises an error for two leaves that orbax would write to one place.

    Plain orbax joins the keys of a path by dots, so that `a.b` and `b` in `a` are one.
    """
    by_name: dict[str, list[str]] = {}
    for keys, _ in parts(tree):
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
            "Choose --format bridge.",
            unsupported=problems,
        )
