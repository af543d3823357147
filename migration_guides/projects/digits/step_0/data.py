"""The digits of scikit-learn, and batches of them."""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

TRAINING_IMAGES = 1536


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns images `(n, 8, 8, 1)` in [0, 1] and labels `(n,)`, for training and held out."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    training, held_out = np.split(order, [TRAINING_IMAGES])
    return (images[training], labels[training]), (images[held_out], labels[held_out])


def batches(
    images: np.ndarray, labels: np.ndarray, size: int, count: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields `count` random batches of `size` images and their labels."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        chosen = rng.integers(len(labels), size=size)
        yield images[chosen], labels[chosen]
