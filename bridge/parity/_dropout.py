"""Finds layers that drop at random in a run that is meant to be deterministic."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
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


def remedy(module: Any, function: Any) -> str:
    """How dropout is turned off in a model.

    Args:
      module: the model's Linen or NNX module.
      function: the function of it that is called, without its `self` bound.
    """
    ways = []
    parameters = inspect.signature(function).parameters if callable(function) else {}
    ways += [f"kwargs={{{n!r}: {off}}}" for n, off in _SWITCHES.items() if n in parameters]
    ways += [f"{where} = {off} in the model" for where, off in _switched_on(module)]
    if not ways:
        ways = ["pass deterministic=None to the layer, so that the check can choose"]
    return (
        f"turn it off with {' or '.join(ways)}; a module and its wrapper, which draw the same keys,"
        " can also be compared with it: train=True, rngs={'dropout': key}"
    )


def evaluating(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Those of a call's arguments that say that it is no training."""
    off = {**_SWITCHES, "use_running_average": True}
    return {name: value for name, value in off.items() if arguments.get(name) is value}


def _switched_on(module: Any) -> Iterable[tuple[str, bool]]:
    """The fields of the model, and of the configs that it holds, that turn dropout on."""
    own = _attributes(module)
    for name, off in _SWITCHES.items():
        if own.get(name) is (not off):
            yield name, off
    for name, value in own.items():
        if not isinstance(value, nn.Module | nnx.Pytree | type):
            for inner, off in _SWITCHES.items():
                held = value.get(inner) if isinstance(value, Mapping) else _held(value, inner)
                if held is (not off):
                    yield f"{name}.{inner}", off


def _held(value: Any, name: str) -> Any:
    return getattr(value, name, None) if hasattr(value, "__dict__") else None


def _attributes(module: Any) -> dict[str, Any]:
    if isinstance(module, nn.Module):
        return {f.name: getattr(module, f.name, None) for f in dataclasses.fields(module)}
    return dict(vars(module))
