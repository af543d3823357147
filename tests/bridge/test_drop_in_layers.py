"""Linen's own layers and lifted transforms have the same state and outputs with either module."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from tests.bridge.peer import described, on_both
from tests.models import assert_identical

X = jnp.arange(12.0).reshape(1, 4, 3)


class Holding(nn.Module):
    """Has a submodule, or several, as a field."""

    inner: Any

    @nn.compact
    def __call__(self, x):
        for layer in jax.tree.leaves(self.inner):
            x = layer(x)
        return x


class Normalised(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x):
        return self.norm(nn.Dense(2))(x)


class Perturbed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.perturb("hidden", nn.Dense(2)(x))


class Repeated(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda dense, carry, _: (dense(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return body(nn.Dense(3), x, None)[0]


PARAMS_MAPPED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
LAYERS = {
    "a submodule as a field": Holding(nn.Dense(2)),
    "submodules in a dict as a field": Holding({"a": nn.Dense(2), "b": nn.Dense(3)}),
    "submodules in a list as a field": Holding([nn.Dense(2), nn.Dense(3)]),
    "Sequential": nn.Sequential([nn.Dense(2), nn.relu, nn.Dense(3)]),
    "RNN": nn.RNN(nn.LSTMCell(4)),
    "Bidirectional": nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
    "attention": nn.MultiHeadDotProductAttention(num_heads=1),
    "WeightNorm": Normalised(nn.WeightNorm),
    "SpectralNorm": Normalised(
        lambda layer: functools.partial(nn.SpectralNorm(layer), update_stats=False)
    ),
    "Conv": nn.Conv(2, (2,)),
    "perturb": Perturbed(),
    "nn.remat": nn.remat(nn.Dense)(2),
    "nn.jit": nn.jit(nn.Dense)(2),
    "nn.vmap": nn.vmap(nn.Dense, **PARAMS_MAPPED)(2),
    "nn.scan": Repeated(),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_layer_does_what_it_does_with_flax_nnx_bridge(layer):
    def program(bridge):
        model = bridge.lazy_init(bridge.ToNNX(layer, rngs=nnx.Rngs(0)), X)
        return described(model), model(X)

    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


def test_decoding_fills_the_cache_in_place():
    def program(bridge):
        attention = nn.MultiHeadDotProductAttention(num_heads=1, decode=True)
        model = bridge.lazy_init(bridge.ToNNX(attention, rngs=nnx.Rngs(0)), X)
        tokens = [model(X[:, i : i + 1], mutable=["cache"]) for i in range(2)]
        return tokens, described(model)

    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


def test_perturbations_carry_gradients():
    def program(bridge):
        model = bridge.lazy_init(bridge.ToNNX(Perturbed(), rngs=nnx.Rngs(0)), X)
        wanted = nnx.DiffState(0, nnx.Perturbation)
        return described(nnx.grad(lambda model: (model(X) ** 2).sum(), argnums=wanted)(model))

    theirs, ours = on_both(program)
    assert theirs
    assert_identical(ours, theirs)


def test_an_embedding_attends():
    def program(bridge):
        model = bridge.ToNNX(nn.Embed(5, 3), rngs=nnx.Rngs(0)).lazy_init(jnp.array([1, 2]))
        return model(jnp.array([3])), model.attend(X)

    theirs, ours = on_both(program)
    assert_identical(ours, theirs)
