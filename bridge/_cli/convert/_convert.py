"""Writes a converted checkpoint: all of it, or nothing."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx
from flax.core import meta

from bridge import checkpoint
from bridge._cli import _checkpoints, _command, _conversion
from bridge._cli._output import Result
from bridge._errors import CheckpointError
from bridge.checkpoint import _publish, _save, _single_files
from bridge.checkpoint._stored import parts


def converted(arguments: argparse.Namespace) -> Result:
    """Plans the conversion, and writes what comes of it.

    Raises InputError if there are rules and no model. Raises CheckpointError if CHECKPOINT cannot
    be read, what is at OUT is not replaced, the format cannot hold the values, or writing fails;
    what was there is then unchanged.
    """
    rules = _command.load_rules(arguments.rules)
    contents = _checkpoints.read(arguments.checkpoint, arguments.within, arguments.layout)
    plan = None
    if arguments.model or rules is not None:
        plan = _conversion.plan_for(contents, rules, arguments)
    layout = "nnx" if (plan.to_nnx if plan else not contents.is_linen) else "linen"
    form = arguments.format or (
        "safetensors" if arguments.out.suffix == ".safetensors" else "orbax"
    )
    ok = plan is None or plan.ok
    writes = ok and not arguments.dry_run
    if writes:
        arguments.tell(f"writing {arguments.out}")
        _write(arguments, _conversion.applied(plan) if plan else contents.tree(), form, layout)
    document = {"written": writes, "layout": layout, "left_out": [*contents.left_out]}
    shown = [str(plan)] if plan else []
    if contents.left_out:
        shown.append(f"left out, as it is not a weight: {', '.join(contents.left_out)}")
    if writes:
        shown.append(f"written: {arguments.out} (layout {layout}, {form})")
    elif ok:
        shown.append("nothing was written (--dry-run)")
    else:
        shown.append(
            "nothing was written: the checkpoint does not fit the model; bridge.port.suggest, or"
            " parity --suggest with both models, proposes rules"
        )
    planned = json.loads(plan.to_json()) if plan else {}
    return Result("convert", {**document, **planned}, shown, ok)


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
