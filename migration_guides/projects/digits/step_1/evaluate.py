"""Evaluation."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from .train import TrainState


@jax.jit
def _logits(graphdef: nnx.GraphDef, state: nnx.State, images: Any) -> jax.Array:
    # On a copy: whatever a layer does in evaluation, the model stays as it is.
    return nnx.merge(graphdef, state)(images)


def logits(state: TrainState, images: Any) -> jax.Array:
    """Returns logits `(batch, classes)` for images `(batch, 8, 8, 1)`."""
    state.model.eval()
    return _logits(*nnx.split(state.model), images)


def accuracy(state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of images whose label has the largest logit."""
    return float((logits(state, images).argmax(axis=-1) == labels).mean())
