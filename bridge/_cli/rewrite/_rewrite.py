"""Rewrites the model of a TARGET, writes the files that are asked for, and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import linen as nn

from bridge._cli import _target
from bridge._cli._input_errors import InputError
from bridge._cli._output import new_table
from bridge._cli._result import Result
from bridge.rewrite import Rewrite, rewrite


def rewritten(arguments: argparse.Namespace) -> Result:
    """Rewrites a model.

    Raises:
        InputError: a TARGET gives no Linen model, or no inputs are known.
        RewriteError: it cannot be run, or a file is not written.
    """
    if arguments.as_linen and arguments.in_place:
        raise InputError("--in-place", "--as-linen too", "one of the two", "use --write")
    if arguments.in_place and arguments.train:
        raise InputError("--in-place", "--train too", "one of the two", "use --write")
    result = _result(arguments)
    diff = "" if arguments.no_diff else _diff(result, arguments)
    written: tuple[str, ...] = ()
    if arguments.write:
        written = result.write(overwrite=arguments.overwrite, test=arguments.write_test)
    elif arguments.in_place:
        written = result.write(in_place=True, by_hand=arguments.by_hand, test=arguments.write_test)
    if arguments.html is not None:
        arguments.html.write_text(result.html(), encoding="utf-8")
    stale = result.pending() if arguments.check else ()
    shown = [*_shown(result, diff, written, stale)]
    if (arguments.write or arguments.in_place) and not written:
        shown.append("nothing was written: the files are unchanged")
    document = {**json.loads(result.to_json()), "written": [*written]}
    return Result("rewrite", document, shown, result.ok and not stale)


def _result(arguments: argparse.Namespace) -> Rewrite:
    with contextlib.ExitStack() as stack:
        (make, sample), *others = [
            _entry(stack.enter_context(_target.opened(target, arguments)), target)
            for target in (arguments.target, *arguments.model)
        ]
        train = arguments.train
        return rewrite(
            make,
            *sample.inputs,
            kwargs=dict(sample.kwargs),
            method=sample.method,
            also=[(make, *more.inputs, dict(more.kwargs)) for make, more in others],
            keep_names=arguments.keep_names,
            only=arguments.only,
            skip=arguments.skip,
            gradients=arguments.gradients,
            fast=arguments.fast,
            as_linen=arguments.as_linen,
            train=None if train is None else stack.enter_context(_target.opened_name(train)),
            progress=arguments.tell,
        )


def _entry(
    make: Callable[[], _target.Sample], target: str
) -> tuple[Callable[[], Any], _target.Sample]:
    """What makes the Linen model of a TARGET, and its call."""
    sample = make()
    if not isinstance(sample.model, nn.Module):
        raise InputError(target, "an NNX model", "a Linen model", "it is NNX already")
    if not sample.inputs and not sample.kwargs:
        raise _target.no_inputs(target)
    return lambda: make().model, sample


def _diff(result: Rewrite, arguments: argparse.Namespace) -> str:
    """The new text against the old files, or beside them."""
    if not arguments.in_place:
        return result.diff
    lines: list[str] = []
    for path, text in result.in_place(arguments.by_hand).items():
        before = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), path, path)
    return "".join(lines)


def _shown(
    result: Rewrite, diff: str, written: Sequence[str], stale: Sequence[str]
) -> Iterator[Any]:
    """The diff, the classes and the proof."""
    if diff:
        yield diff.rstrip("\n")
    rows = [
        (
            each.name,
            each.level,
            f"{pathlib.Path(each.file).name}:{each.line}",
            "; ".join(each.notes),
        )
        for each in result.classes
    ]
    yield new_table(("class", "level", "where", "notes"), rows)
    yield f"{result.native}; {result.verdict}"
    yield from result.notes
    yield from (f"to rewrite more: {each}" for each in result.remedies)
    yield from (f"to change by hand: {place}" for place in result.places)
    yield from result.training.shown() if result.training is not None else ()
    yield from (f"written: {path}" for path in written)
    yield from (f"--write would write {path}" for path in stale)
