"""scikit-learn's bundled handwritten digits, split once and spread over a data-parallel mesh."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH_SIZE = 128
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Digits:
    """The digits and where they live.

    Attributes:
        train_images: `(1437, 8, 8, 1)` float32 in [0, 1].
        train_labels: `(1437,)` int32.
        held_out_images: `(360, 8, 8, 1)`, sharded over the mesh: the fixed batch of every
            comparison.
        held_out_labels: `(360,)` int32.
        mesh: one axis, `data`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    held_out_images: jax.Array
    held_out_labels: np.ndarray
    mesh: Mesh

    @property
    def steps_per_epoch(self) -> int:
        """How many full batches the training images give."""
        return len(self.train_labels) // BATCH_SIZE

    def batches(self, seed: int, count: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields `count` shuffled batches, each sharded over the axis `data`."""
        order = np.random.default_rng(seed)
        sharding = _split(self.mesh)
        remaining = np.empty(0, dtype=np.int64)
        for _ in range(count):
            if len(remaining) < BATCH_SIZE:
                remaining = order.permutation(len(self.train_labels))
            chosen, remaining = remaining[:BATCH_SIZE], remaining[BATCH_SIZE:]
            yield jax.device_put((self.train_images[chosen], self.train_labels[chosen]), sharding)

    def accuracy(self, logits: np.ndarray) -> float:
        """Returns the share of held-out digits that `logits`, `(360, 10)`, name correctly."""
        return float(np.mean(np.argmax(logits, axis=-1) == self.held_out_labels))


def load() -> Digits:
    """Loads the digits and lays a mesh with the axis `data` over every device.

    Returns:
        An 80/20 split, stratified by digit and the same for every seed, so that accuracies of two
        runs compare.
    """
    # Not at the top: scikit-learn takes more than a second to import.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8, 1) / 16
    train_images, held_out_images, train_labels, held_out_labels = map(
        np.asarray,
        train_test_split(
            images,
            np.asarray(labels, np.int32),
            test_size=0.2,
            stratify=labels,
            random_state=_SPLIT_SEED,
        ),
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return Digits(
        train_images=train_images,
        train_labels=train_labels,
        held_out_images=jax.device_put(held_out_images, _split(mesh)),
        held_out_labels=held_out_labels,
        mesh=mesh,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts a whole copy on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())


def _split(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))
