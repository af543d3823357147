"""The rules that a model needs for a checkpoint."""

from __future__ import annotations

import argparse

from flax import nnx

from bridge import port
from bridge._cli import _checkpoints, _conversion, _rules_file, _target
from bridge._cli._input_errors import InputError
from bridge._cli._result import Result


def suggested(arguments: argparse.Namespace) -> Result:
    """The rules that `--model` needs, by names and by the calls of the models that are given.

    Raises InputError if there is no `--model`, or a TARGET gives no model of the right library, and
    PortError if a model cannot be traced.
    """
    if arguments.model is None:
        raise InputError(
            "--suggest", "no --model", "the model that needs the rules", "give --model"
        )
    rules = _rules_file.load(arguments.rules)
    contents = _checkpoints.read(arguments.checkpoint, arguments.within, arguments.layout)
    reader, model = _target.abstract(arguments.model, arguments)
    to_nnx = isinstance(model, nnx.Module)
    source = _conversion.source_of(contents, arguments, reader.inputs, model)
    if arguments.source_model is None:
        lacking = "--source-model" if reader.inputs else "--input and --source-model"
        if not to_nnx:
            return Result.of_suggestions(
                "convert", port.suggest(source, model, rules=rules), lacking
            )
        found = port.suggest(source, model, *reader.inputs, rules=rules, **reader.kwargs)
        return Result.of_suggestions("convert", found, lacking)
    writer, _ = _target.abstract(arguments.source_model, arguments, reader.inputs)
    native, linen = (reader, writer) if to_nnx else (writer, reader)
    if isinstance(linen.model, nnx.Module):
        raise InputError(
            "--source-model", "an NNX model", "the Linen model that wrote CHECKPOINT", "name it"
        )
    # Both models are called with the same, whichever TARGET tells it.
    inputs = native.inputs or linen.inputs
    call = _target.applying(linen)
    found = port.suggest(source, model, *inputs, linen=call, rules=rules, **native.kwargs)
    return Result.of_suggestions("convert", found, "" if inputs else "--input")
