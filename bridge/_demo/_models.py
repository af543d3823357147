"""The digits network as it stands at each step of the migration, from Linen to NNX.

The Linen networks use automatic names (`ConvBlock_0`, `Conv_0`), the NNX ones attribute names
(`block1`, `conv`), as most code does, so that every step has real renames to make.
"""

from collections.abc import Callable

import jax
from flax import linen as nn
from flax import nnx

from bridge import ToNNX, to_linen

CLASSES = 10
FEATURES = (16, 32, 32)
DROPOUT_RATE = 0.1
MOMENTUM = 0.9


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, ReLU and Dropout, in Linen."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns activations `(batch, height, width, features)`."""
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        x = nn.relu(x)
        return nn.Dropout(DROPOUT_RATE, deterministic=not train)(x)


class NnxConvBlock(nnx.Module):
    """The same block in NNX."""

    def __init__(self, in_features: int, features: int, *, rngs: nnx.Rngs) -> None:
        """Creates the block's Variables."""
        self.conv = nnx.Conv(in_features, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=MOMENTUM, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT_RATE, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool | None = None) -> jax.Array:
        """Returns activations `(batch, height, width, features)`.

        Args:
            x: images or activations, `(batch, height, width, in_features)`.
            train: the mode, as a Linen caller passes it; None leaves it to `train()` and `eval()`.
        """
        frozen = None if train is None else not train
        x = nnx.relu(self.norm(self.conv(x), use_running_average=frozen))
        return self.dropout(x, deterministic=frozen)


class DigitsCNN(nn.Module):
    """Steps 0 and 1: everything in Linen."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits `(batch, 10)` for images `(batch, 8, 8, 1)`."""
        x = ConvBlock(FEATURES[0])(images, train=train)
        x = ConvBlock(FEATURES[1])(x, train=train)
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = ConvBlock(FEATURES[2])(x, train=train)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class MixedDigitsCNN(nn.Module):
    """Step 2: Linen on top, the second block is native NNX."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits `(batch, 10)` for images `(batch, 8, 8, 1)`."""
        x = ConvBlock(FEATURES[0])(images, train=train)
        x = to_linen(NnxConvBlock, FEATURES[0], FEATURES[1])(x, train=train)
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = ConvBlock(FEATURES[2])(x, train=train)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class _NnxTop(nnx.Module):
    """The forward pass that steps 3 and 4 share: NNX on top, whatever the children are."""

    block1: Callable[[jax.Array], jax.Array]
    block2: Callable[[jax.Array], jax.Array]
    block3: Callable[[jax.Array], jax.Array]
    head: Callable[[jax.Array], jax.Array]

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits `(batch, 10)` for images `(batch, 8, 8, 1)`."""
        x = self.block2(self.block1(images))
        x = self.block3(nnx.max_pool(x, (2, 2), (2, 2)))
        return self.head(x.mean(axis=(1, 2)))


class NnxOverLinenCNN(_NnxTop):
    """Step 3: NNX on top; the blocks that nobody has rewritten yet are Linen leaves."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        """Wraps the Linen leaves, which `lazy_init` fills, and creates the native block."""
        self.block1 = ToNNX(ConvBlock(FEATURES[0]), rngs=rngs)
        self.block2 = NnxConvBlock(FEATURES[0], FEATURES[1], rngs=rngs)
        self.block3 = ToNNX(ConvBlock(FEATURES[2]), rngs=rngs)
        self.head = ToNNX(nn.Dense(CLASSES), rngs=rngs)


class NnxDigitsCNN(_NnxTop):
    """Step 4: everything in NNX."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        """Creates the network's Variables."""
        self.block1 = NnxConvBlock(1, FEATURES[0], rngs=rngs)
        self.block2 = NnxConvBlock(FEATURES[0], FEATURES[1], rngs=rngs)
        self.block3 = NnxConvBlock(FEATURES[1], FEATURES[2], rngs=rngs)
        self.head = nnx.Linear(FEATURES[2], CLASSES, rngs=rngs)
