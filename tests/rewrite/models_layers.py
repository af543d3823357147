"""Classes that derive from Flax's own layers, and programs that use them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


def centred(kernel, axis):
    return kernel - jnp.mean(kernel, axis=axis, keepdims=True)


class CentredConv(nn.Conv):
    """A convolution that reads its kernel in another way."""

    def param(self, name: str, init_fn, *init_args, **options) -> Any:
        found = super().param(name, init_fn, *init_args, **options)
        # The bias stays as it is.
        if name == "kernel":
            found = centred(found, (0, 1, 2))
        return found


class Scaled(nn.Dense):
    """A layer with a default and a field of its own, and with a call around the layer's."""

    use_bias: bool = False
    gain: float = 2.0  # of the outputs

    def __call__(self, inputs):
        return super().__call__(inputs) * (self.gain / self.features)


class MoreScaled(Scaled):
    gain: float = 3.0


class Exact(nn.LayerNorm):
    epsilon: float = 1e-3


class Quiet(nn.Dropout):
    """Only another name."""


class Model(nn.Module):
    conv: Any = CentredConv
    norm: Any = functools.partial(Exact, use_bias=False)

    @nn.compact
    def __call__(self, x, train: bool = False):
        conv = functools.partial(self.conv, use_bias=True)
        x = nn.relu(conv(4, (3, 3), (2, 2), name="stem")(x))
        x = self.norm(name="first")(conv(features=4, kernel_size=(1, 1))(x))
        x = Exact(1e-2)(x.mean((1, 2)))
        x = Quiet(0.5)(Scaled(5, gain=0.5)(x), not train)
        return MoreScaled(3)(x)


class OwnParamAndCall(nn.Dense):
    """a subclass of a Flax layer defines both param and __call__"""

    def param(self, name, *args, **kwargs):
        return 2 * super().param(name, *args, **kwargs)

    def __call__(self, inputs):
        return super().__call__(inputs)


class OtherInitialiser(nn.Dense):
    """a subclass of a Flax layer changes an initialiser"""

    def param(self, name, init_fn, *args, **kwargs):
        del init_fn
        return super().param(name, nn.initializers.ones, *args, **kwargs)


class OtherName(nn.Dense):
    """a subclass of a Flax layer makes its parameters in its own way"""

    def param(self, name, *args, **kwargs):
        return super().param(f"own_{name}", *args, **kwargs)


class MakesMore(nn.Dense):
    """a subclass of a Flax layer makes modules or variables"""

    @nn.compact
    def __call__(self, inputs):
        return inputs + self.param("shift", nn.initializers.ones, (3,))


class OwnSetup(nn.Dense):
    """a subclass of a Flax layer defines its own setup"""

    def setup(self):
        self.factor = 2

    def __call__(self, inputs):
        return super().__call__(inputs) * self.factor


class WrappedConv(nn.Module):
    """What brings the layer is a field, and NNX lacks the layer."""

    conv: Any = nn.Conv

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(self.conv, use_bias=False)
        return nn.Dense(2)(conv(3, (2, 2), name="local")(x))
