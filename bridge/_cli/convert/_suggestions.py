"""The rules that a model needs for a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from flax import linen as nn

from bridge import port
from bridge._cli import _model, _target
from bridge._cli._conversion_plan import source_of
from bridge._cli._input_errors import InputError
from bridge._cli._leaves import CheckpointContents
from bridge._cli._rules_file import Rules


def suggestions(
    contents: CheckpointContents, rules: Rules, arguments: argparse.Namespace
) -> tuple[port.Suggestions, str]:
    """The rules that `--model` needs, and what would tell the order of calls if nothing did.

    Args:
        contents: the checkpoint.
        rules: rules that are certain already.
        arguments: those of `convert`.

    Raises:
        InputError: a TARGET gives no model of the right library.
        PortError: a model cannot be traced.
    """
    to_nnx = arguments.to == "nnx"
    kwargs = dict(arguments.kwargs)
    inputs = _target.parse_inputs(arguments.inputs)
    one, other = "--model", "--source-model"
    native_option, linen_option = (one, other) if to_nnx else (other, one)
    targets = {one: arguments.model, other: arguments.source_model}
    native, linen, shapes, own = None, None, inputs or (), kwargs
    if targets[native_option] is not None:
        native = _model.called(targets[native_option], inputs, kwargs)
        shapes = native.inputs
        if to_nnx:
            # Skip arguments that only the other model takes.
            own = {name: value for name, value in kwargs.items() if name in native.kwargs}
    model = _model.abstract_values(arguments.model, inputs, own, to_nnx=to_nnx)
    source = source_of(contents, rules, arguments, to_nnx=to_nnx)
    if targets[linen_option] is not None:
        linen, own_shapes = _linen_call(targets[linen_option], shapes or inputs, kwargs)
        # Both models are called with the same, whichever TARGET tells it.
        shapes = shapes or own_shapes
    if native is None:
        return port.suggest(source, model, rules=rules.paths), f"{other} would tell it"
    found = port.suggest(source, model, *shapes, linen=linen, rules=rules.paths, **native.kwargs)
    options = [] if shapes else ["--input"]
    options += [] if linen is not None else [other]
    return found, f"{' and '.join(options)} would tell it" if options else ""


def _linen_call(
    target: str, inputs: tuple[Any, ...] | None, kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """A function that applies the Linen model of a TARGET to variables and inputs; the inputs."""
    sample = _model.called(target, inputs, kwargs)
    if not isinstance(sample.model, nn.Module):
        raise InputError(
            "--source-model",
            f"{type(sample.model).__name__}, which is NNX",
            "the Linen model that wrote CHECKPOINT",
            "leave it out, or name another one",
        )
    return _model.applying(sample.model, sample.method, sample.kwargs), sample.inputs
