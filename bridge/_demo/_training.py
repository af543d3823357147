"""The two training loops a migrating team has: variables passed around (Linen), and NNX's own.

Both place weights whole on every device and split each batch over the axis `data`, so XLA inserts
the all-reduces and BatchNorm sees the statistics of the whole batch.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from bridge._demo import _digits, _weights

Batches = Iterable[tuple[jax.Array, jax.Array]]


def optimizer() -> optax.GradientTransformation:
    """Returns the optimizer of every step."""
    return optax.adam(1e-3)


class Trainee(Protocol):
    """A model of either kind, as the demo drives it."""

    def weights(self) -> _weights.Weights:
        """Returns the current weights."""
        ...

    def logits(self, images: jax.Array) -> jax.Array:
        """Returns evaluation-mode logits `(batch, 10)`."""
        ...

    def fit(self, batches: Batches) -> None:
        """Takes one training step per batch."""
        ...


class LinenTrainee:
    """A Linen model in the usual Linen loop: `apply`, `mutable=`, a dropout key per step."""

    def __init__(self, module: nn.Module, variables: dict[str, Any], seed: int, mesh: Mesh) -> None:
        """Places `variables`, weights and all, on the mesh."""
        self._variables = jax.device_put(variables, _digits.replicated(mesh))
        self._dropout = jax.random.key(seed)
        transform = optimizer()
        self._opt_state = jax.device_put(
            transform.init(self._variables["params"]), _digits.replicated(mesh)
        )

        @jax.jit
        def step(
            variables: dict[str, Any],
            opt_state: Any,
            images: jax.Array,
            labels: jax.Array,
            key: Any,
        ) -> tuple[dict[str, Any], Any]:
            def loss(params: Any) -> tuple[jax.Array, Any]:
                logits, updates = module.apply(
                    {**variables, "params": params},
                    images,
                    train=True,
                    rngs={"dropout": key},
                    mutable=["batch_stats"],
                )
                return _cross_entropy(logits, labels), updates

            gradients, updates = jax.grad(loss, has_aux=True)(variables["params"])
            changes, opt_state = transform.update(gradients, opt_state)
            params = optax.apply_updates(variables["params"], changes)
            return {**variables, **updates, "params": params}, opt_state

        self._step = step
        self._logits = jax.jit(module.apply)

    def weights(self) -> _weights.Weights:
        """Returns the current weights."""
        return _weights.from_linen(self._variables)

    def logits(self, images: jax.Array) -> jax.Array:
        """Returns evaluation-mode logits `(batch, 10)`."""
        return self._logits(self._variables, images)

    def fit(self, batches: Batches) -> None:
        """Takes one training step per batch."""
        for images, labels in batches:
            self._dropout, key = jax.random.split(self._dropout)
            self._variables, self._opt_state = self._step(
                self._variables, self._opt_state, images, labels, key
            )
            _finish(self._variables)


class NnxTrainee:
    """An NNX model in the usual NNX loop: `nnx.Optimizer`, `train()`, `eval()`, `nnx.jit`."""

    def __init__(self, model: nnx.Module, mesh: Mesh) -> None:
        """Places the model's Variables on the mesh."""
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, _digits.replicated(mesh)))
        self._model = model
        self._optimizer = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
        opt_state = nnx.state(self._optimizer)
        nnx.update(self._optimizer, jax.device_put(opt_state, _digits.replicated(mesh)))

    def weights(self) -> _weights.Weights:
        """Returns the current weights."""
        return _weights.from_nnx(self._model)

    def logits(self, images: jax.Array) -> jax.Array:
        """Returns evaluation-mode logits `(batch, 10)`."""
        self._model.eval()
        return _nnx_logits(self._model, images)

    def fit(self, batches: Batches) -> None:
        """Takes one training step per batch."""
        self._model.train()
        for images, labels in batches:
            _nnx_step(self._model, self._optimizer, images, labels)
            _finish(nnx.state(self._model, nnx.Param))


@nnx.jit
def _nnx_logits(model: Callable[[jax.Array], jax.Array], images: jax.Array) -> jax.Array:
    return model(images)


@nnx.jit
def _nnx_step(
    model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> None:
    def loss(model: Any) -> jax.Array:
        return _cross_entropy(model(images), labels)

    optimizer.update(model, nnx.grad(loss)(model))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _finish(tree: Any) -> None:
    # Emulated devices share the host's threads: with several steps in flight, one step's
    # all-reduce can wait for devices that are busy with another, and XLA aborts the process.
    jax.block_until_ready(tree)
