"""The classifier."""

import jax
import jax.numpy as jnp
from flax import nnx

import bridge

from .config import Config
from .layers import Block, Stem

IMAGE_SHAPE = (8, 8, 1)
TOKENS = 16
DEFAULT = Config()


class Classifier(nnx.Module):
    """Stem, blocks and head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        """Creates the layers; `lazy_init` gives the stem its variables."""
        self.stem = bridge.ToNNX(Stem(config.features), rngs=rngs)
        position = nnx.initializers.normal(0.02)(rngs.params(), (TOKENS, config.features))
        self.position = nnx.Param(position)
        self.blocks = nnx.List(
            Block(config.features, config.hidden, config.dropout, rngs=rngs)
            for _ in range(config.layers)
        )
        self.norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.head = nnx.Linear(config.features, config.classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits `(batch, classes)` for images `(batch, 8, 8, 1)`."""
        x = self.stem(images) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(axis=1)))


def create_model(config: Config = DEFAULT) -> nnx.Module:
    """Returns the classifier before training."""
    model = Classifier(config, rngs=nnx.Rngs(config.seed, dropout=config.seed + 1))
    model.eval()
    return bridge.lazy_init(model, jax.ShapeDtypeStruct((1, *IMAGE_SHAPE), jnp.float32))
