"""Evaluation."""

from typing import Any

import jax
import numpy as np

from .model import Classifier
from .train import TrainState


@jax.jit
def logits(state: TrainState, images: Any) -> jax.Array:
    """Returns logits `(batch, classes)` for images `(batch, 8, 8, 1)`."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return Classifier(state.config).apply(variables, images, train=False)


def accuracy(state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of images whose label has the largest logit."""
    return float((logits(state, images).argmax(axis=-1) == labels).mean())
