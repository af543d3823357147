"""Modules of both kinds that hold modules of the other kind."""

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class LinenOverNNX(nn.Module):
    """Compact: a Dense layer, then a bridged NNX module called `middle`."""

    inner: type = nnx.Linear

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="first")(x)
        return bridge.to_linen(self.inner, 4, 4, name="middle")(x)


class LinenSetupOverNNX(nn.Module):
    """The same with `setup`."""

    inner: type = nnx.Linear

    def setup(self):
        self.first = nn.Dense(4)
        self.middle = bridge.to_linen(self.inner, 4, 4)

    def __call__(self, x):
        return self.middle(self.first(x))


class NNXOverLinen(nnx.Module):
    """A Linear layer, then a bridged Linen module called `middle`."""

    def __init__(self, din, dout, *, rngs, inner=None):
        self.first = nnx.Linear(din, 4, rngs=rngs)
        self.middle = bridge.ToNNX(nn.Dense(dout) if inner is None else inner, rngs)

    def __call__(self, x):
        return self.middle(self.first(x))


class NNXOverLinenOverNNX(nnx.Module):
    """Three levels, for a fourth one around it."""

    def __init__(self, din, dout, *, rngs):
        self.outer = nnx.Linear(din, 4, rngs=rngs)
        self.linen = bridge.ToNNX(LinenOverNNX(), rngs)

    def __call__(self, x):
        return self.linen(self.outer(x))


class LinenOverNNXOverLinenOverNNX(nn.Module):
    """Four levels."""

    @nn.compact
    def __call__(self, x):
        return bridge.to_linen(NNXOverLinenOverNNX, 4, 4, name="nnx")(x)


def dense(x, params):
    """The pure computation of a Dense or a Linear layer."""
    return jnp.dot(x, params["kernel"]) + params["bias"].reshape(1, -1)


def paths(tree, path=()):
    """The path of every leaf of nested mappings, joined."""
    if hasattr(tree, "items"):
        return sorted(p for k, v in tree.items() for p in paths(v, (*path, str(k))))
    return ["/".join(path)]
