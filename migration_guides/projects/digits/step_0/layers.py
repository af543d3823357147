"""The layers of the classifier."""

import jax
from flax import linen as nn


class Stem(nn.Module):
    """Images as tokens: a convolution that makes one token of each patch of 2 by 2 pixels."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns tokens `(batch, 16, features)` for images `(batch, 8, 8, 1)`."""
        x = nn.Conv(self.features, (2, 2), strides=2, use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x.reshape(x.shape[0], -1, self.features)


class Mlp(nn.Module):
    """Two dense layers; the hidden one is split over the mesh axis `model`."""

    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.gelu(nn.Dense(self.hidden, kernel_init=kernel_init)(x))
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
    """An MLP behind a LayerNorm, with a residual connection around both."""

    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        return x + Mlp(self.hidden, self.dropout)(nn.LayerNorm()(x), train)
