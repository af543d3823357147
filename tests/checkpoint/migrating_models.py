"""One model at every stage of its migration; the variables have the same paths at each of them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

INPUTS = jnp.asarray([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


class LinenModel(nn.Module):
    """Before the migration."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2)(x)


class LinenModelWithNnxHead(nn.Module):
    """A Linen model one of whose modules is NNX."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return bridge.ToLinen(nnx.Linear, args=(4, 2), name="Dense_1")(x)


class NnxModelWithLinenBody(nnx.Module):
    """An NNX model some of whose modules are Linen."""

    def __init__(self, *, rngs):
        self.Dense_0 = bridge.ToNNX(nn.Dense(4), rngs=rngs)
        self.BatchNorm_0 = bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=rngs)
        self.Dropout_0 = nnx.Dropout(0.5, rngs=rngs)
        self.Dense_1 = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.Dense_1(self.Dropout_0(self.BatchNorm_0(self.Dense_0(x))))


def linen_variables(model=None, seed=0):
    """Variables whose statistics are not those of a fresh model."""
    model = model or LinenModel()
    variables = model.init(jax.random.key(seed), INPUTS)
    rngs = {"dropout": jax.random.key(seed + 1)}
    updates = model.apply(variables, INPUTS, train=True, mutable=["batch_stats"], rngs=rngs)[1]
    return {**variables, **updates}


def to_nnx_model(seed=5):
    """The whole Linen model as one NNX module."""
    return bridge.ToNNX(LinenModel(), rngs=nnx.Rngs(seed)).lazy_init(INPUTS)


def mixed_model(seed=5):
    """The partly migrated NNX model in evaluation mode."""
    model = bridge.lazy_init(NnxModelWithLinenBody(rngs=nnx.Rngs(seed)), INPUTS)
    model.eval()
    return model
