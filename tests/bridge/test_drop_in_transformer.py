"""A small transformer, mixed both ways and trained, gives the same losses with either module."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from tests.bridge.peer import described, on_both
from tests.models import assert_identical

KEY = jax.random.key(0)
VOCABULARY, WIDTH, LENGTH, STEPS = 11, 8, 5, 3
TOKENS = jax.random.randint(jax.random.key(1), (2, LENGTH + 1), 0, VOCABULARY)


class FeedForward(nnx.Module):
    """Native NNX, inside Linen blocks."""

    def __init__(self, width, rate=0.0, *, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.largest = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        x = self.down(nnx.gelu(self.up(x)))
        self.largest[...] = jnp.maximum(self.largest[...], jnp.abs(x).max())
        return self.dropout(x)


class Attention(nn.Module):
    """Linen, inside an NNX block and inside Linen ones."""

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        return nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)


class LinenBlock(nn.Module):
    bridge: Any

    @nn.compact
    def __call__(self, x):
        x = x + Attention()(nn.LayerNorm()(x))
        return x + self.bridge.to_linen(FeedForward, WIDTH, name="feed_forward")(nn.LayerNorm()(x))


class NNXBlock(nnx.Module):
    """NNX with a Linen attention, for the middle of a Linen model."""

    def __init__(self, bridge, *, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = bridge.ToNNX(Attention(), rngs=rngs)
        # Without this flax.nnx.bridge would have no parameters here.
        bridge.lazy_init(self.attention, jnp.ones((1, LENGTH, WIDTH)))

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class Transformer(nn.Module):
    bridge: Any

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(VOCABULARY, WIDTH)
        x = embedding(tokens) + self.param("position", nn.initializers.normal(), (1, LENGTH, WIDTH))
        x = LinenBlock(self.bridge)(x)
        x = self.bridge.to_linen(NNXBlock, self.bridge)(x)
        return embedding.attend(nn.LayerNorm()(x))


def loss_of(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


def fixed(params):
    """Parameters that do not depend on which key reached which module."""

    def fill(path, p):
        seed = sum(map(ord, jax.tree_util.keystr(path)))
        return 0.3 * jax.random.normal(jax.random.key(seed), p.shape)

    return jax.tree_util.tree_map_with_path(fill, params)


def trained_as_linen(bridge):
    """The mixture as a Linen model, in a TrainState."""
    model = Transformer(bridge)
    variables = jax.jit(model.init)({"params": KEY, "dropout": KEY}, TOKENS[:, :-1])
    state = TrainState.create(
        apply_fn=model.apply, params=fixed(variables["params"]), tx=optax.sgd(0.1)
    )
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    @jax.jit
    def step(state, rest):
        def objective(params):
            logits, updates = state.apply_fn(
                {**rest, "params": params}, TOKENS[:, :-1], mutable=["batch_stats"]
            )
            return loss_of(logits), updates

        (loss, updates), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {**rest, **updates}, loss

    losses = []
    for _ in range(STEPS):
        state, rest, loss = step(state, rest)
        losses.append(loss)
    return losses, state.params, rest["batch_stats"]


def trained_as_nnx(bridge):
    """The mixture wrapped whole into an NNX model, with an nnx.Optimizer."""
    model = bridge.ToNNX(Transformer(bridge), rngs=nnx.Rngs(0, dropout=1))
    nnx.jit(bridge.lazy_init)(model, TOKENS[:, :-1])
    nnx.update(model, fixed(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def objective(model):
            return loss_of(model(TOKENS[:, :-1], mutable=["batch_stats"]))

        loss, grads = nnx.value_and_grad(objective)(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer) for _ in range(STEPS)]
    return losses, described(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))


@functools.cache
def results(program):
    return on_both(program)


WAYS = {"linen with a TrainState": trained_as_linen, "nnx with an Optimizer": trained_as_nnx}


@pytest.mark.parametrize("program", WAYS.values(), ids=WAYS)
def test_training_gives_the_losses_and_parameters_of_flax_nnx_bridge(program):
    theirs, ours = results(program)
    assert_identical(ours, theirs)
    assert ours[0][-1] < ours[0][0]


def test_both_ways_of_training_agree():
    _, linen = results(trained_as_linen)
    _, wrapped = results(trained_as_nnx)
    np.testing.assert_allclose(linen[0], wrapped[0], rtol=1e-5)


def test_the_mixture_has_the_paths_it_has_with_flax_nnx_bridge():
    def paths(bridge):
        init = Transformer(bridge).init
        variables = jax.eval_shape(init, {"params": KEY, "dropout": KEY}, TOKENS[:, :-1])
        return [(path, name, metadata) for path, name, metadata, _ in described(variables)]

    theirs, ours = on_both(paths)
    assert ours == theirs
    assert (
        "params",
        "ToLinen_0",
        "attention",
        "MultiHeadDotProductAttention_0",
        "key",
        "bias",
    ) in [path for path, *_ in ours]
