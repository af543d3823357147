"""Models with weights that are tied in other ways, and layers of `match`; as in `models_left`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn


class ReadsAllVariables(nn.Module):
    """variables that are read in another way"""

    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x):
        return self.layer(x) + sum(map(jnp.sum, self.layer.variables["params"].values()))


class AppliesWithLocal(nn.Module):
    """a layer that is applied has arguments of setup"""

    def setup(self):
        width = 3
        self.layer = nn.Dense(width, use_bias=False)

    def __call__(self, x):
        return self.layer.apply({"params": {"kernel": jnp.ones((3, 3))}}, x)


class AppliesAndCalls(nn.Module):
    """a layer is called and applied to other weights"""

    def setup(self):
        self.layer = nn.Dense(3, use_bias=False)

    def __call__(self, x):
        return self.layer.apply({"params": {"kernel": jnp.ones((3, 3))}}, self.layer(x))


class AppliesInCall(nn.Module):
    """the call decides whether a layer has weights of its own"""

    def setup(self):
        self.layer = nn.Dense(3, use_bias=False)

    def __call__(self, x):
        if x.ndim > 0:
            return self.layer.apply({"params": {"kernel": jnp.ones((x.shape[-1], 3))}}, x)
        return self.layer(x)


class MatchesArgument(nn.Module):
    """an argument of the call decides which layers there are, by match"""

    @nn.compact
    def __call__(self, x, kind="wide"):
        match kind:
            case "wide":
                x = nn.Dense(8)(x)
            case "deep":
                x = nn.Dense(3)(nn.Dense(3)(x))
        return x
