"""Runs `python -m bridge rewrite` and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._cli import _output, _target
from bridge._cli._input_errors import InputError
from bridge._cli._options import in_options
from bridge.rewrite import Rewrite, rewrite

# The options that refusals name.
_NAMED = ("--model", "--only", "--skip")


def rewritten(arguments: argparse.Namespace, progress: Any) -> Rewrite | None:
    """Rewrites the model of a TARGET.

    Returns:
        The result, None if it was rewritten in place before.

    Raises:
        InputError: a TARGET gives no Linen model, or no inputs are known.
        RewriteError: it cannot be run.
    """
    given = _target.parse_inputs(arguments.inputs)
    kwargs = dict(arguments.kwargs)
    task = progress.task_ids[0] if progress.task_ids else None

    def told(text: str) -> None:
        if task is not None:
            progress.update(task, description=text)

    with contextlib.ExitStack() as stack:
        targets = [
            (stack.enter_context(_target.imported(target)), target)
            for target in (arguments.target, *arguments.model)
        ]
        if arguments.in_place and all(_is_nnx(*each) for each in targets):
            return None
        entries = [_entry(make, given, kwargs, target) for make, target in targets]
        (make, inputs, own, method), *others = entries
        return rewrite(
            make,
            *inputs,
            kwargs=own,
            method=arguments.method or method,
            also=[(other, *more, named) for other, more, named, _ in others],
            keep_names=arguments.keep_names,
            only=arguments.only,
            skip=arguments.skip,
            gradients=arguments.gradients,
            fast=arguments.fast,
            progress=told,
        )


def _is_nnx(make: Any, target: str) -> bool:
    """Whether a target is an NNX class, or gives an NNX module."""
    if _target.is_nnx_class(target):
        return True
    try:
        return isinstance(make(), nnx.Module)
    except Exception:
        # What a Linen target raises is told where its model is made.
        return False


def _entry(make: Callable[[], Any], given: Any, kwargs: Any, target: str) -> Any:
    sample = _target.sample_of(make(), given, target, kwargs)
    if not isinstance(sample.model, nn.Module):
        raise InputError(target, "an NNX model", "a Linen model", "it is NNX already")
    if not sample.inputs and not sample.kwargs:
        raise InputError(target, "no inputs", "inputs for the model", "pass --input 1,28,28,1")

    def model() -> nn.Module:
        return _target.sample_of(make(), given, target, kwargs).model  # pyright: ignore

    return model, sample.inputs, dict(sample.kwargs), sample.method


def diff_of(result: Rewrite, arguments: argparse.Namespace) -> str:
    """What is shown of the new text."""
    if arguments.no_diff:
        return ""
    if not arguments.in_place:
        return result.diff
    lines: list[str] = []
    for path, text in result.in_place(arguments.by_hand).items():
        before = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), path, path)
    return "".join(lines)


def show(result: Rewrite, written: Sequence[str], stale_files: Sequence[str], diff: str) -> None:
    """Shows the diff, the classes and the proof."""
    if diff:
        _output.show(diff.rstrip("\n"))
    table = _output.new_table("class", "level", "where", "notes")
    for each in result.classes:
        where = f"{pathlib.Path(each.file).name}:{each.line}"
        notes = in_options("; ".join(each.notes), _NAMED)
        table.add_row(each.name, each.level, where, notes)
    _output.show(table)
    lines = [f"{result.native}; {result.verdict}", *result.notes]
    lines += [f"to rewrite more: {in_options(each, _NAMED)}" for each in result.remedies]
    lines += [f"to change by hand: {place}" for place in result.places]
    lines += [f"written: {path}" for path in written]
    lines += [f"--write would write {path}" for path in stale_files]
    _output.show("\n".join(lines))
