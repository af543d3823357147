"""Layers of the program's own, which derive from Flax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class Scaled(nn.Dense):
    """Calls the layer, and does more."""

    factor: float = 2.0
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        return self.factor * super().__call__(x) / self.features


class Same(nn.Conv):
    """Another default alone."""

    padding: str = "VALID"


class Plain(nn.LayerNorm):
    def __call__(self, x):
        return super().__call__(x.astype(jnp.float32))


class Standardized(nn.Dense):
    """Parameters that no constructor of NNX's makes."""

    def param(self, name, *args, **kwargs):
        found = super().param(name, *args, **kwargs)
        return found - found.mean() if name == "kernel" else found


class Model(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        x = Same(4, (2,))(x)
        x = Scaled(self.width, factor=3.0)(Plain()(x))
        x = x + Scaled(self.width, use_bias=True, name="second")(x)
        return Standardized(3)(jax.nn.relu(x))
