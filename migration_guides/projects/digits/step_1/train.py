"""Training."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from .config import Config
from .model import create_model

WARM_UP_STEPS = 4

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes, in place."""

    model: nnx.Module
    optimizer: nnx.Optimizer
    config: Config


@functools.cache
def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Returns the one optimizer of a configuration, so that jitted functions know it again."""
    return optax.adam(optax.linear_schedule(0.0, config.learning_rate, WARM_UP_STEPS))


_create_model = nnx.jit(create_model, static_argnums=0)


def create(config: Config) -> TrainState:
    """Returns the state before the first step."""
    model = _create_model(config)
    optimizer = nnx.Optimizer(model, optimizer_of(config), wrt=nnx.Param)
    return TrainState(model, optimizer, config)


def partition_specs(config: Config) -> list[jax.sharding.PartitionSpec]:
    """Returns how each parameter and statistic is to be split over a mesh."""
    model = nnx.eval_shape(lambda: create_model(config))
    return jax.tree.leaves(nnx.get_partition_spec(nnx.state(model, (nnx.Param, nnx.BatchStat))))


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, images: Any, labels: Any) -> jax.Array:
    """Makes one step and returns the loss before it."""

    def loss_of(model: nnx.Module) -> jax.Array:
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def fit(state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, list[float]]:
    """Returns the state after a step for each batch, and the losses."""
    state.model.train()
    losses = []
    for images, labels in batches:
        loss = train_step(state.model, state.optimizer, images, labels)
        losses.append(float(loss))
    return state, losses
