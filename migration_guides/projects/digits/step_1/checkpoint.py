"""Checkpoints."""

import pathlib
from typing import Any, NamedTuple

from flax import serialization

import bridge

from .renames import FROM_LINEN
from .train import TrainState, optimizer_of


class LinenTraining(NamedTuple):
    """What an optimizer has in the Linen program."""

    opt_state: Any
    step: Any


def save(path: pathlib.Path, state: TrainState) -> None:
    """Writes a state to a directory."""
    bridge.checkpoint.save(path, state.model, extra={"optimizer": state.optimizer})


def load(path: pathlib.Path, state: TrainState) -> TrainState:
    """Returns the state, with what a directory holds; it is one of the same configuration."""
    bridge.checkpoint.restore(path, state.model, extra={"optimizer": state.optimizer}, rngs=True)
    return state


def load_linen(path: pathlib.Path, state: TrainState) -> TrainState:
    """Returns the state, with what a file of the Linen program holds."""
    stored = serialization.msgpack_restore(path.read_bytes())
    variables = {name: stored[name] for name in ("params", "batch_stats")}
    opt_state = optimizer_of(state.config).init(stored["params"])
    opt_state = serialization.from_state_dict(opt_state, stored["opt_state"])

    plan = bridge.port.plan(variables, state.model, FROM_LINEN)
    plan.apply()
    plan.apply_optimizer(LinenTraining(opt_state, stored["step"]), state.optimizer)
    return state
