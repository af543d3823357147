"""Training in shards: parameters and the optimizer's state stay where the annotations say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
from tests._sharding.sharded_models import (
    KEY,
    X,
    gathered,
    linen_init,
    mesh,
    nnx_init,
    uniform,
    variables_of,
)
from tests.models import assert_identical

Y = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
TX = optax.sgd(1e-2, momentum=0.9)
SPECS = {"wrapped": P("data", "model"), "native": P("model", "data")}
KINDS = pytest.mark.parametrize("kind", ["auto", "explicit"])
# Gradients are summed over devices in another order.
CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


class Pair(nnx.Module):
    """A matrix in Linen and one in NNX."""

    def __init__(self, rngs):
        kernel = linen_init("mesh", uniform, "embed", "mlp")
        self.wrapped = bridge.ToNNX(nn.Dense(16, kernel_init=kernel), rngs)
        kernel = nnx_init("mesh", uniform, "mlp", "embed")
        self.native = nnx.Linear(16, 8, kernel_init=kernel, rngs=rngs)

    def __call__(self, x):
        return gathered(self.native(jnp.tanh(gathered(self.wrapped(x)))))


def squared_error(y):
    return ((y - Y) ** 2).mean()


def assert_sharded(tree, on, *, annotated_only=False):
    """That two kernels, or what belongs to them, are in their shards, and all else is whole."""
    kernels = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place = jax.tree_util.keystr(path)
        spec = next((SPECS[n] for n in SPECS if n in place and "kernel" in place), None)
        if spec is not None:
            kernels += 1
            assert leaf.sharding.is_equivalent_to(NamedSharding(on, spec), leaf.ndim), place
        elif not annotated_only:
            assert leaf.sharding.is_fully_replicated, place
    return kernels


def trained_by_hand(params, steps=2):
    """(losses, parameters), on one device, without a module in sight."""
    params = jax.tree.map(np.asarray, params)
    state, losses = jax.tree.map(np.zeros_like, params), []
    for _ in range(steps):
        value, params, state = _step_by_hand(params, state)
        losses.append(value)
    return losses, params


@jax.jit
def _step_by_hand(params, momentum):
    def loss(params):
        h = X
        for name, activation in (("wrapped", jnp.tanh), ("native", lambda h: h)):
            h = activation(h @ params[name]["kernel"] + params[name]["bias"][None])
        return squared_error(h)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return value, jax.tree.map(lambda p, m: p - 1e-2 * m, params, momentum), momentum


@KINDS
def test_linen_variables_train_with_optax_in_their_shards(kind):
    on = mesh(kind)
    module = bridge.to_linen(Pair)
    variables = bridge.init_sharded(module, on, X, rngs=KEY)
    params = variables.pop("params")
    losses, expected = trained_by_hand(nn.unbox(params))

    def step(params, state):
        loss = lambda params: squared_error(module.apply({"params": params, **variables}, X))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = TX.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    with jax.set_mesh(on):
        state = TX.init(params)
        assert assert_sharded(state, on) == 2
        # Over Auto axes the compiler would choose for what is not annotated.
        where = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step, out_shardings=(None, *where))
        for loss in losses:
            value, params, state = step(params, state)
            CLOSE(value, loss)
            assert assert_sharded(params, on) == 2
            assert assert_sharded(state, on) == 2
    jax.tree.map(CLOSE, nn.unbox(params), expected)


@KINDS
def test_a_mixed_model_trains_with_an_nnx_optimizer_in_its_shards(kind):
    on = mesh(kind)
    model = bridge.init_sharded(Pair, on, X, rngs=KEY)
    losses, expected = trained_by_hand(variables_of(model)["params"])

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda model: squared_error(model(X)))(model)
        optimizer.update(model, grads)
        return value

    with jax.set_mesh(on):
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        assert assert_sharded(nnx.state(optimizer), on) == 2
        for loss in losses:
            CLOSE(step(model, optimizer), loss)
            params, state = nnx.state(model, nnx.Param), nnx.state(optimizer)
            assert assert_sharded(params, on, annotated_only=True) == 2
            assert assert_sharded(state, on, annotated_only=True) == 2
    jax.tree.map(CLOSE, variables_of(model)["params"], expected)


class Training(nnx.Module):
    """A model and its optimizer."""

    def __init__(self, rngs):
        self.model = bridge.lazy_init(Pair(rngs), X)
        self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)


@KINDS
def test_a_model_and_its_optimizer_can_be_made_in_shards_by_one_program(kind):
    on = mesh(kind)
    made = bridge.init_sharded(Training, on, rngs=KEY)
    assert assert_sharded(nnx.state(made.model, nnx.Param), on) == 2
    assert assert_sharded(nnx.state(made.optimizer), on) == 2
    first = made.optimizer.opt_state[0].trace["wrapped"]["kernel"]
    assert {shard.data.shape for shard in first[...].addressable_shards} == {(12, 4)}
    alone = bridge.init_sharded(Pair, on, X, rngs=KEY)
    assert_identical(variables_of(made.model)["params"], variables_of(alone)["params"])


class Noisy(nn.Module):
    """Statistics that a step updates, and a mask that it draws."""

    @nn.compact
    def __call__(self, x, train=True):
        kernel = linen_init("mesh", uniform, "embed", "mlp")
        x = nn.Dense(16, kernel_init=kernel, name="wrapped")(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_step_in_shards_updates_and_masks_as_linen_on_one_device():
    on, steps = mesh("auto"), 2
    rngs = nnx.Rngs(params=0, dropout=1)
    build = bridge.ToNNX(Noisy(), rngs, mutable=["batch_stats"])
    native = nnx.clone(build.to_nnx__rngs)
    model = bridge.init_sharded(build, on, X)
    variables = jax.tree.map(np.asarray, model.linen_variables())
    tx = optax.sgd(0.1)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda model: (model(X) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    @jax.jit
    def linen_step(variables, keys):
        def loss(params):
            given = {**variables, "params": params}
            y, updates = Noisy().apply(given, X, rngs=keys, mutable=["batch_stats"])
            return (y**2).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return value, {"params": params, **updates}

    native.params()
    with jax.set_mesh(on):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for _ in range(steps):
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                value, variables = linen_step(variables, {"dropout": native.dropout()})
            CLOSE(step(model, optimizer), value)
            kernel = model.wrapped["kernel"].get_value()
            assert kernel.sharding.is_equivalent_to(NamedSharding(on, SPECS["wrapped"]), 2)
            jax.tree.map(CLOSE, nn.unbox(model.linen_variables()), nn.unbox(variables))
