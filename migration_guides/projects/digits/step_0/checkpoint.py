"""Checkpoints."""

import pathlib

from flax import serialization

from .train import TrainState


def save(path: pathlib.Path, state: TrainState) -> None:
    """Writes a state to a file."""
    path.write_bytes(serialization.to_bytes(state))


def load(path: pathlib.Path, state: TrainState) -> TrainState:
    """Returns the state that a file holds; `state` is one of the same configuration."""
    return serialization.from_bytes(state, path.read_bytes())
