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
) -> port.Suggestions:
    """The rules that `--model` needs.

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
    native = _model.called(arguments.model, inputs, kwargs)
    # Skip arguments that only the other model takes.
    own = {name: value for name, value in kwargs.items() if name in native.kwargs}
    model = _model.abstract_values(arguments.model, inputs, own, to_nnx=to_nnx)
    source = source_of(contents, rules, model, to_nnx=to_nnx)
    if not to_nnx:
        return port.suggest(source, model, rules=rules.paths)
    linen = None
    if arguments.source_model is not None:
        linen = _linen_call(arguments.source_model, native.inputs, kwargs)
    return port.suggest(
        source, model, *native.inputs, linen=linen, rules=rules.paths, **native.kwargs
    )


def _linen_call(target: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that applies the Linen model of a TARGET to variables and inputs."""
    sample = _model.called(target, inputs, kwargs)
    if not isinstance(sample.model, nn.Module):
        raise InputError(
            "--source-model",
            f"{type(sample.model).__name__}, which is NNX",
            "the Linen model that wrote CHECKPOINT",
            "leave it out, or name another one",
        )
    return _model.applying(sample.model, sample.method, sample.kwargs)
