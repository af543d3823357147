"""Rewrites the model of a TARGET, writes the files that are asked for, and shows the result."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from flax import linen as nn

from bridge._cli import _target
from bridge._cli._command import InputError
from bridge._cli._output import Result, new_table
from bridge._nnx_in_linen.implemented_by import is_implemented
from bridge.rewrite import Rewrite, RewriteError
from bridge.rewrite._function import entry, rewrite_entries
from bridge.rewrite.discover._found import Found, discovered

# What makes a model, and its call.
_Made: TypeAlias = tuple[Callable[[], Any], _target.Sample]


def rewritten(arguments: argparse.Namespace) -> Result:
    """Rewrites models.

    Raises InputError if a TARGET gives no Linen model or no inputs are known, and RewriteError if
    one cannot be run or a file is not written.
    """
    if arguments.as_linen and arguments.in_place:
        raise InputError("--in-place", "--as-linen too", "one of the two", "use --write")
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_discovered(arguments)) if arguments.discover else None
        if found is not None and not found.entries and not arguments.model:
            done = f"every model that {found.command} calls runs an NNX class already"
            if arguments.train is not None:
                raise RewriteError(
                    "the training cannot be rewritten: its model runs NNX classes",
                    [f"{done}: {', '.join(found.done)}"],
                    "--train starts from the Linen classes. Take the commit that --as-linen made"
                    " back, such as by git revert, and run this again.",
                )
            document = {"ok": True, "discovered": found.document}
            return Result("rewrite", document, [f"{done}: {', '.join(found.done)}"])
        made = _targets(arguments, found, stack)
        # As --as-linen --write leaves them.
        are_done = all(is_implemented(type(sample.model)) for _, sample in made)
        if found is None and arguments.as_linen and arguments.check and are_done:
            line = "every model of these TARGETs runs an NNX class already"
            return Result("rewrite", {"ok": True}, [line])
        return _written(_result(arguments, found, made, stack), arguments, found)


def _written(result: Rewrite, arguments: argparse.Namespace, found: Found | None) -> Result:
    """Writes what is asked for."""
    diff = "" if arguments.no_diff else _diff(result, arguments)
    written: tuple[str, ...] = ()
    if arguments.write:
        written = result.write(overwrite=arguments.overwrite, test=arguments.write_test)
    elif arguments.in_place:
        written = result.write(in_place=True, by_hand=arguments.by_hand, test=arguments.write_test)
    if arguments.html is not None:
        arguments.html.write_text(result.html(), encoding="utf-8")
    stale = result.pending() if arguments.check else ()
    shown = [*(_shown_found(found) if found else ()), *_shown(result, diff, written, stale)]
    if (arguments.write or arguments.in_place) and not written:
        shown.append("nothing was written: the files are unchanged")
    document = {**json.loads(result.to_json()), "written": [*written]}
    if found is not None:
        document["discovered"] = found.document
    return Result("rewrite", document, shown, result.ok and not stale)


def _discovered(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Found]:
    """The models that a command calls."""
    if not arguments.target:
        expected = "a command behind --"
        raise InputError("--discover", "no command", expected, "add -- python -m pytest tests")
    if arguments.inputs is not None or arguments.kwargs:
        expected = "the inputs of the command"
        raise InputError("--discover", "--input or --kwarg too", expected, "leave them out")
    return discovered(
        arguments.target,
        pathlib.Path.cwd(),
        allow_failure=arguments.allow_failure,
        on_progress=arguments.tell,
    )


def _targets(
    arguments: argparse.Namespace, found: Found | None, stack: contextlib.ExitStack
) -> list[_Made]:
    """What makes the models of all TARGETs, and their calls."""
    targets: list[str] = [*arguments.model]
    if found is None:
        if len(arguments.target) != 1:
            texts = " ".join(arguments.target) or "none"
            raise InputError("TARGET", texts, "one TARGET", "name others with --model")
        targets[:0] = arguments.target
    return [_made(stack.enter_context(_target.opened(t, arguments)), t) for t in targets]


def _result(
    arguments: argparse.Namespace,
    found: Found | None,
    made: Sequence[_Made],
    stack: contextlib.ExitStack,
) -> Rewrite:
    entries = [each.entry for each in found.entries] if found is not None else []
    entries += [entry(m, s.inputs, dict(s.kwargs), s.method) for m, s in made]
    train = arguments.train
    return rewrite_entries(
        entries,
        keep_names=arguments.keep_names,
        only=arguments.only,
        skip=arguments.skip,
        gradients=arguments.gradients,
        fast=arguments.fast,
        as_linen=arguments.as_linen,
        train=None if train is None else stack.enter_context(_target.opened_name(train)),
        progress=arguments.tell,
    )


def _made(make: Callable[[], _target.Sample], target: str) -> _Made:
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


def _shown_found(found: Found) -> Iterator[Any]:
    """The entry points."""
    yield new_table(("entry point", "call", "fields"), [each.row for each in found.entries])
    yield from (f"not an entry point: {each}" for each in found.left)
    if found.done:
        yield f"runs an NNX class already: {', '.join(found.done)}"


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
    for name, share in result.left_shares.items():
        yield f"{100 * share:.3g} % of the parameters stay Linen because of {name}"
    yield from (f"to rewrite more: {each}" for each in result.remedies)
    yield from (f"to change by hand: {place}" for place in result.places)
    yield from result.training.shown() if result.training is not None else ()
    yield from (f"written: {path}" for path in written)
    yield from (f"--write would write {path}" for path in stale)
