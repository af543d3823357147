"""What `python -m bridge rewrite` does and shows."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn

from bridge._cli import _output, _target
from bridge._cli._input_errors import InputError
from bridge.rewrite import Rewrite, rewrite


def rewritten(arguments: argparse.Namespace, progress: Any) -> Rewrite:
    """Rewrites the model of a TARGET.

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
        entries = [
            _entry(stack.enter_context(_target.imported(target)), given, kwargs, target)
            for target in (arguments.target, *arguments.model)
        ]
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
            progress=told,
        )


def _entry(make: Callable[[], Any], given: Any, kwargs: Any, target: str) -> Any:
    sample = _target.sample_of(make(), given, target, kwargs)
    if not isinstance(sample.model, nn.Module):
        raise InputError(target, "an NNX model", "a Linen model", "it is NNX already")
    if not sample.inputs and not sample.kwargs:
        raise InputError(target, "no inputs", "inputs for the model", "pass --input 1,28,28,1")

    def model() -> nn.Module:
        return _target.sample_of(make(), given, target, kwargs).model  # pyright: ignore

    return model, sample.inputs, dict(sample.kwargs), sample.method


def stale(result: Rewrite) -> tuple[str, ...]:
    """The new files that are not there, or are others."""
    return result.pending()


def show(
    result: Rewrite, written: Sequence[str], stale_files: Sequence[str], *, with_diff: bool
) -> None:
    """Shows the diff, the classes and the proof."""
    if with_diff and result.diff:
        _output.show(result.diff.rstrip("\n"))
    table = _output.new_table("class", "level", "where", "notes")
    for each in result.classes:
        where = f"{pathlib.Path(each.file).name}:{each.line}"
        table.add_row(each.name, each.level, where, "; ".join(each.notes))
    _output.show(table)
    lines = [result.verdict, *result.notes]
    lines += [f"to change by hand: {place}" for place in result.places]
    lines += [f"written: {path}" for path in written]
    lines += [f"--write would write {path}" for path in stale_files]
    _output.show("\n".join(lines))
