"""Models with what is not rewritten; each class's docstring is its reason."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import bridge


def head(x, *sizes):
    return nn.Dense(sizes[-1], name="head")(x)


class MadeByFunction(nn.Module):
    """a function with * arguments makes a layer"""

    @nn.compact
    def __call__(self, x):
        return head(nn.relu(nn.Dense(4)(x)), 3)


class Mixed(nn.Module):
    """mixed classes stay Linen: bridge.to_linen makes an NNX module"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(bridge.to_linen(nnx.Linear, 3, 4, name="lin")(x))


class InnerFunction(nn.Module):
    """a module is made in a function inside of a method"""

    size: int = 4

    @nn.compact
    def __call__(self, x):
        def layer(y):
            return nn.relu(nn.Dense(self.size)(y))

        return layer(layer(x))


class MethodTwice(nn.Module):
    """a method that makes layers is called several times"""

    def block(self, x, size):
        return nn.relu(nn.Dense(size)(x))

    @nn.compact
    def __call__(self, x):
        return self.block(self.block(x, 4), 3)


class WhileLoop(nn.Module):
    """a module is made in a while loop"""

    @nn.compact
    def __call__(self, x):
        count = 0
        while count < 2:
            x = nn.Dense(4)(x)
            count += 1
        return x


class TryBlock(nn.Module):
    """a module is made where an exception was caught"""

    @nn.compact
    def __call__(self, x):
        try:
            x = nn.Dense(4)(x)
            raise ValueError
        except ValueError:
            x = x + 1
        return x


class OwnPostInit(nn.Module):
    """the class has its own __post_init__"""

    size: int = 4

    def __post_init__(self):
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size)(x)


class OwnTrain(nn.Module):
    """NNX modules have a method train of their own"""

    def train(self):
        return True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class ReadsPath(nn.Module):
    """NNX modules have no self.path"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + len(self.path)


class RematMethod(nn.Module):
    """a method under @nn.remat"""

    @nn.remat
    @nn.compact
    def __call__(self, x, scale=1.0):
        return nn.Dense(3)(x)


class CellThatStaysLinen(nn.Module):
    """a layer that stays Linen, in a method under a transform"""

    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.ConvLocal(3, (2,))(x)


class ScanLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(x.shape[-1])(x), None


class StackedInOneExpression(nn.Module):
    """stacked layers are given what another layer returns"""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            ScanLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return layers()(nn.Dense(4)(x), None)[0]


class SowsElsewhere(nn.Module):
    """sow into another collection, or with its own reduction"""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        self.sow("losses", "norm", (x**2).mean(), reduce_fn=lambda a, b: b)
        return x


class PerturbedElsewhere(nn.Module):
    """perturb in another collection"""

    @nn.compact
    def __call__(self, x):
        return self.perturb("x", nn.Dense(3)(x), "others")


class CacheOfPartial(nn.Module):
    """a decode cache that a partial turns on"""

    @nn.compact
    def __call__(self, x):
        attention = functools.partial(nn.MultiHeadDotProductAttention, decode=True)
        return attention(num_heads=1)(x)


class CacheInList(nn.Module):
    """a decode cache in a list of setup"""

    def setup(self):
        self.layers = [nn.MultiHeadDotProductAttention(1, decode=True) for _ in range(2)]

    def __call__(self, x):
        return self.layers[0](self.layers[1](x))


class CacheInSequential(nn.Module):
    """a decode cache under a transform or inside of a layer"""

    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(3), nn.MultiHeadDotProductAttention(1, decode=True)])(x)


class CachesOfShapes(nn.Module):
    """decode caches of several shapes"""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            y = x[:, : x.shape[1] - i]
            x = nn.MultiHeadDotProductAttention(1, decode=True)(y) if self.is_initializing() else x
        return x


class ComputedNames(nn.Module):
    """several variables whose names are not written out"""

    names: tuple[str, ...] = ("a", "b")

    @nn.compact
    def __call__(self, x):
        return sum(x * self.param(name, nn.initializers.ones, ()) for name in self.names)


class NeedsValue(nn.Module):
    """a constructor needs scale, which only the call knows"""

    @nn.compact
    def __call__(self, x, scale=0.5):
        return nn.Dense(3, kernel_init=nn.initializers.constant(scale))(x)


class NeedsRoot(nn.Module):
    """a constructor needs bound, which only the call knows"""

    @nn.compact
    def __call__(self, x):
        x = jnp.sort(x)
        bound = 1 / np.sqrt(x.shape[-1])
        return nn.Dense(3, bias_init=nn.initializers.uniform(bound))(x)


class OwnLayer(nn.Sequential):
    """it derives from Sequential, which is not of this package"""


class FieldCls(nn.Module):
    """NNX constructors take no argument cls"""

    cls: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        return self.cls(3)(x)


class DefaultModule(nn.Module):
    """the default of a field is a module"""

    inner: Any = nn.Dense(3, parent=None)

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


class SeveralArrays(nn.Module):
    """a parameter that holds several arrays"""

    @nn.compact
    def __call__(self, x):
        both = self.param("both", lambda key: {"scale": jnp.ones(3), "bias": jnp.zeros(3)})
        return x * both["scale"] + both["bias"]


class Spectral(nn.Module):
    """nn.SpectralNorm names its variables by its layer"""

    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(3))(x, update_stats=False)


class Counted(nn.Module):
    """it makes modules of its own class, directly or not"""

    depth: int = 2

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return Counted(self.depth - 1)(x) if self.depth else x


class Hidden(nn.Module):
    """it is used only inside of what stays Linen"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class HidesIt(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Hidden, variables="params")()(x)


class Differs(nn.Module):
    """its values differ from those of the Linen class"""

    @nn.compact
    def __call__(self, x):
        # Something that no source shows: what came before.
        COUNT.append(1)
        return nn.Dense(3)(x) * len(COUNT)


COUNT: list[int] = []
