"""The layers of the classifier."""

import jax
from flax import linen as nn
from flax import nnx

import bridge


class Stem(nn.Module):
    """Images as tokens: a convolution that makes one token of each patch of 2 by 2 pixels."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns tokens `(batch, 16, features)` for images `(batch, 8, 8, 1)`."""
        x = nn.Conv(self.features, (2, 2), strides=2, use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x.reshape(x.shape[0], -1, self.features)


class Mlp(nnx.Module):
    """Two dense layers; the hidden one is split over the mesh axis `model`."""

    def __init__(self, features: int, hidden: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        """Creates the layers for activations of width `features`."""
        # The program places its arrays itself, so no mesh is needed here.
        split = {"out_sharding": (None, "model"), "eager_sharding": False}
        self.up = nnx.Linear(features, hidden, kernel_metadata=split, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.down = nnx.Linear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        y = self.dropout(nnx.gelu(self.up(x)), deterministic=deterministic)
        return self.down(y)


class Block(nn.Module):
    """An MLP behind a LayerNorm, with a residual connection around both."""

    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns activations of the shape of `x`, `(batch, tokens, features)`."""
        mlp = bridge.ToLinen(
            Mlp,
            args=(x.shape[-1], self.hidden, self.dropout),
            rng_state=False,
            eager_sharding=False,
            name="mlp",
        )
        return x + mlp(nn.LayerNorm()(x), deterministic=not train)
