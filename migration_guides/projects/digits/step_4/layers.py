"""The layers of the classifier."""

import jax
from flax import nnx


class Stem(nnx.Module):
    """Images as tokens: a convolution that makes one token of each patch of 2 by 2 pixels."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        """Creates the layers for images of one channel."""
        self.conv = nnx.Conv(1, features, (2, 2), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns tokens `(batch, 16, features)` for images `(batch, 8, 8, 1)`."""
        x = nnx.relu(self.norm(self.conv(images)))
        return x.reshape(x.shape[0], -1, x.shape[-1])


class Mlp(nnx.Module):
    """Two dense layers; the hidden one is split over the mesh axis `model`."""

    def __init__(self, features: int, hidden: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        """Creates the layers for activations of width `features`."""
        # The program places its arrays itself, so no mesh is needed here.
        split = {"out_sharding": (None, "model"), "eager_sharding": False}
        self.up = nnx.Linear(features, hidden, kernel_metadata=split, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.down = nnx.Linear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        return self.down(self.dropout(nnx.gelu(self.up(x))))


class Block(nnx.Module):
    """An MLP behind a LayerNorm, with a residual connection around both."""

    def __init__(self, features: int, hidden: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        """Creates the layers for activations of width `features`."""
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.mlp = Mlp(features, hidden, dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        return x + self.mlp(self.norm(x))
