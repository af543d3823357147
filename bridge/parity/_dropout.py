"""Finds layers that drop at random in a run that is meant to be deterministic."""

from __future__ import annotations

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

    Only a layer with a dropout rate, and with an argument or a field `deterministic` as Flax's own
    layers have, can drop anything. `modes` are those that a check sets on Linen modules; on NNX
    modules they are set already.
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


def evaluating(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Those of a call's arguments that say that it is not training."""
    off = {**_SWITCHES, "use_running_average": True}
    return {name: value for name, value in off.items() if arguments.get(name) is value}
