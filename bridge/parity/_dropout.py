"""Finds layers that drop at random in a run that is meant to be deterministic."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._train_eval import TRAINING

_RATES = ("rate", "dropout_rate")
# Names of the argument, and the value that turns dropout off.
_SWITCHES: Mapping[str, bool] = {"deterministic": True, **dict.fromkeys(TRAINING, False)}


def is_dropping(
    module: nn.Module | nnx.Module, arguments: Mapping[str, Any], modes: Mapping[str, Any]
) -> bool:
    """Whether a call of a layer drops anything.

    Args:
      module: a layer; one that has a rate and a field `deterministic`, as Flax's own have.
      arguments: the call's arguments by name.
      modes: those that a check sets on Linen modules; on NNX modules they are set already.
    """
    if not rate_of({name: getattr(module, name, None) for name in _RATES})[1]:
        return False
    # As Flax does: the argument, then the field; a check fills a Linen field that is left open.
    given = arguments.get("deterministic")
    if given is None:
        given = getattr(module, "deterministic", None)
    if given is None:
        given = modes.get("deterministic")
    return given is False


def rate_of(fields: Mapping[str, Any]) -> tuple[str, float]:
    """The name and the value of a layer's dropout rate, 0 if it has none."""
    for name in _RATES:
        rate = fields.get(name)
        if isinstance(rate, int | float) and rate > 0:
            return name, rate
    return "", 0.0


def remedy(function: Any) -> str:
    """How dropout is turned off in a model.

    Args:
      function: the function of it that is called.
    """
    parameters = inspect.signature(function).parameters if callable(function) else {}
    ways = [f"kwargs={{{n!r}: {off}}}" for n, off in _SWITCHES.items() if n in parameters]
    ways.append("deterministic=True in the model or its config, or None, so that the check chooses")
    return (
        f"turn it off with {' or '.join(ways)}; a module and its wrapper, which draw the same keys,"
        " can also be compared with it: train=True, rngs={'dropout': key}"
    )


def evaluating(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Those of a call's arguments that say that it is no training."""
    off = {**_SWITCHES, "use_running_average": True}
    return {name: value for name, value in off.items() if arguments.get(name) is value}
