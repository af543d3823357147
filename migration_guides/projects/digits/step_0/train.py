"""Training."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.training import train_state

from .config import Config
from .model import IMAGE_SHAPE, Classifier

WARM_UP_STEPS = 4

Batch = tuple[np.ndarray, np.ndarray]


class TrainState(train_state.TrainState):
    """Everything that training changes, and the key that dropout's keys are made from."""

    batch_stats: Any
    dropout_key: jax.Array
    config: Config = struct.field(pytree_node=False)


@functools.cache
def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Returns the one optimizer of a configuration, so that jitted functions know it again."""
    return optax.adam(optax.linear_schedule(0.0, config.learning_rate, WARM_UP_STEPS))


def init(config: Config) -> Any:
    """Returns the variables before training, in their boxes."""
    key = jax.random.key(config.seed)
    return Classifier(config).init(key, jnp.zeros((1, *IMAGE_SHAPE)), train=False)


def create(config: Config) -> TrainState:
    """Returns the state before the first step."""
    variables = nn.unbox(jax.jit(init, static_argnums=0)(config))
    state = TrainState.create(
        apply_fn=None,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optimizer_of(config),
        dropout_key=jax.random.PRNGKey(config.seed + 1),
        config=config,
    )
    # A Python number would be another type than the step of the next state, and compiled twice.
    return state.replace(step=jnp.zeros((), jnp.int32))


def partition_specs(config: Config) -> list[jax.sharding.PartitionSpec]:
    """Returns how each parameter and statistic is to be split over a mesh."""
    variables = jax.eval_shape(lambda: init(config))
    return jax.tree.leaves(nn.get_partition_spec(variables))


@jax.jit
def train_step(state: TrainState, images: Any, labels: Any) -> tuple[TrainState, jax.Array]:
    """Returns the state after one step, and the loss before it."""
    dropout_key = jax.random.fold_in(state.dropout_key, state.step)

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        logits, updates = Classifier(state.config).apply(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updates["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss


def fit(state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, list[float]]:
    """Returns the state after a step for each batch, and the losses."""
    losses = []
    for images, labels in batches:
        state, loss = train_step(state, images, labels)
        losses.append(float(loss))
    return state, losses
