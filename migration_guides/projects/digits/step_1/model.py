"""The classifier."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

from .config import Config
from .layers import Block, Stem

IMAGE_SHAPE = (8, 8, 1)
TOKENS = 16
DEFAULT = Config()


class Classifier(nn.Module):
    """Stem, blocks and head; the parameters of the blocks are stacked."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits `(batch, classes)` for images `(batch, 8, 8, 1)`."""
        config = self.config
        x = Stem(config.features, name="stem")(images, train)
        shape = (TOKENS, config.features)
        x = x + self.param("position", nn.initializers.normal(0.02), shape)
        blocks = nn.scan(
            lambda block, x, _: (block(x, train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        block = Block(config.hidden, config.dropout, name="blocks")
        x, _ = blocks(block, x, None)
        x = nn.LayerNorm(name="norm")(x.mean(axis=1))
        return nn.Dense(config.classes, name="head")(x)


def create_model(config: Config = DEFAULT) -> nnx.Module:
    """Returns the classifier before training."""
    model = bridge.ToNNX(Classifier(config), rngs=nnx.Rngs(config.seed, dropout=config.seed + 1))
    return model.lazy_init(jax.ShapeDtypeStruct((1, *IMAGE_SHAPE), jnp.float32), train=False)
