import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import bridge
from bridge import port
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)), jnp.float32)


class LinenModel(nn.Module):
    """A cell that NNX fuses, and a layer that has another name there."""

    @nn.compact
    def __call__(self, x):
        carry = jnp.zeros((2, 3)), jnp.zeros((2, 3))
        return nn.Dense(2)(nn.OptimizedLSTMCell(3, name="cell")(carry, x)[1])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(4, 3, rngs=rngs)
        self.out = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        carry = jnp.zeros((2, 3)), jnp.zeros((2, 3))
        return self.out(self.cell(carry, x)[1])


def kernels_only(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


TRANSFORMATIONS = {
    "adamw, clipped and masked": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mask=kernels_only)
    ),
    "masked moments": optax.chain(optax.masked(optax.trace(0.9), kernels_only), optax.scale(-1e-2)),
    "one for matrices, one for vectors": optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)}, labels
    ),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 10)
    ),
    "every second step": optax.MultiSteps(
        optax.sgd(1e-2, momentum=0.9), 2
    ).gradient_transformation(),
}


@jax.jit
def linen_step(state):
    gradients = jax.grad(lambda p: (LinenModel().apply({"params": p}, X) ** 2).sum())(state.params)
    return state.apply_gradients(grads=gradients)


@nnx.jit
def native_step(model, optimizer):
    optimizer.update(model, nnx.grad(lambda m: (m(X) ** 2).sum())(model))


@pytest.fixture(scope="module")
def template():
    return nnx.jit(lambda: Model(nnx.Rngs(0)))()


@pytest.fixture
def model(template):
    return nnx.clone(template)


@pytest.fixture(scope="module")
def params():
    return random_values(shapes_of(LinenModel(), X))["params"]


def at_start(params, tx):
    return TrainState.create(apply_fn=None, params=params, tx=tx)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_optimizer_state_comes_back_bitwise(name, model, params):
    tx = TRANSFORMATIONS[name]
    state = at_start(params, tx)
    leaves, structure = jax.tree.flatten(state.opt_state)
    rng = np.random.default_rng(0)
    filled = [jnp.asarray(9 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    state = state.replace(opt_state=jax.tree.unflatten(structure, filled), step=4)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": params}, model)
    plan.apply_optimizer(state, optimizer)
    back = plan.inverse().apply_optimizer(optimizer, at_start(params, tx))
    assert jax.tree.structure(back.opt_state) == structure
    assert exact(jax.tree.leaves(back.opt_state)) == exact(filled)
    assert back.step == 4


@pytest.mark.parametrize("tx", [optax.adam(1e-2), TRANSFORMATIONS["every second step"]])
def test_training_goes_on_in_nnx_where_it_stopped_in_linen_and_back(tx, model, params):
    state = at_start(params, tx)
    for _ in range(3):
        state = linen_step(state)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": state.params}, model)
    plan.apply()
    assert plan.apply_optimizer(state, optimizer) is optimizer
    assert int(optimizer.step[...]) == 3

    fresh = at_start(state.params, tx)
    back = plan.inverse().apply_optimizer(optimizer, fresh)
    assert exact(jax.tree.leaves(back.opt_state)) == exact(jax.tree.leaves(state.opt_state))
    assert jax.tree.structure(back.opt_state) == jax.tree.structure(state.opt_state)
    assert back.step == 3

    for _ in range(2):
        state = linen_step(state)
        native_step(model, optimizer)
    expected = plan.convert(state.params)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        np.testing.assert_allclose(leaf[...], expected["params", path], rtol=1e-4, atol=1e-5)
    # And what NNX trained goes on in Linen.
    returned = plan.inverse().apply_optimizer(optimizer, fresh)
    assert returned.step == 5
    for actual, wanted in zip(
        jax.tree.leaves(returned.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-4)


def test_frozen_parameters_and_whole_variables_serve_as_parameters(model, params):
    tx = optax.adam(1e-2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": params}, model)
    for wrapped in (freeze(params), {"params": params}):
        state = at_start(wrapped, tx)
        state = state.replace(
            opt_state=jax.tree.map(lambda x: x + 1, state.opt_state), step=jnp.array(7, jnp.int32)
        )
        plan.apply_optimizer(state, optimizer)
        assert int(optimizer.step[...]) == 7
        back = plan.inverse().apply_optimizer(optimizer, state)
        assert exact(back.opt_state) == exact(state.opt_state)
        assert exact(back.step) == exact(state.step)


def test_states_of_different_transformations_are_refused_unwritten(model, params):
    state = at_start(params, optax.adam(1e-2))
    # In NumPy, which needs no compiling.
    third = jax.tree.map(lambda x: x if x.ndim == 0 else np.full_like(x, 1 / 3), state.opt_state)
    state = state.replace(opt_state=third)
    plan = port.plan({"params": state.params}, model)
    for tx, found in (
        (optax.sgd(1e-2, momentum=0.9), r"opt_state\.0\.trace: only the NNX state has it"),
        (optax.sgd(1e-2), r"opt_state\.0\.mu\.\S*: only the Linen state has it"),
        (optax.chain(optax.clip(1.0), optax.adam(1e-2)), r"opt_state\.1\.0\.mu: only the NNX"),
        (optax.chain(optax.adam(1e-2), optax.scale(2.0)), r"opt_state\.0\.0\.mu: only the NNX"),
        (optax.adam(1e-2, mu_dtype=jnp.bfloat16), "the cast to bfloat16 changes float32 values"),
    ):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = exact(nnx.state(optimizer))
        with pytest.raises(port.PortError, match=found):
            plan.apply_optimizer(state, optimizer)
        assert exact(nnx.state(optimizer)) == before
    short = at_start(params, optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    fitting = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    plan.apply_optimizer(state, fitting)
    with pytest.raises(port.PortError, match="changes float32 values"):
        plan.inverse().apply_optimizer(fitting, short)
    parted = {"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)}
    named = optax.multi_transform(parted, lambda tree: jax.tree.map(lambda _: "rest", tree))
    other = at_start(params, TRANSFORMATIONS["one for matrices, one for vectors"])
    with pytest.raises(port.PortError, match=r"inner_states\.vector.*: only the Linen"):
        plan.apply_optimizer(other, nnx.Optimizer(model, named, wrt=nnx.Param))


def test_a_train_state_of_a_later_step_than_the_plan_is_refused(model, params):
    tx = optax.adam(1e-2)
    old = at_start(params, tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": params}, model)
    new = linen_step(old)
    before = exact(nnx.state(optimizer))
    with pytest.raises(port.PortError, match=r"params/Dense_0/kernel: the plan has other values"):
        plan.apply_optimizer(new, optimizer)
    assert exact(nnx.state(optimizer)) == before
    donated = jax.tree.map(jnp.copy, params)
    stale = port.plan({"params": donated}, model)
    jax.tree.map(lambda x: x.delete(), donated)
    with pytest.raises(port.PortError, match=r"params/Dense_0/kernel: the plan has other values"):
        stale.apply_optimizer(new, optimizer)
    # The values count, and not the arrays that hold them.
    plan.apply_optimizer(old.replace(params=jax.tree.map(np.asarray, params)), optimizer)
    port.plan({"params": new.params}, model).apply_optimizer(new, optimizer)
    assert int(optimizer.step[...]) == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda p: {**p, "Dense_0": {"kernel": jnp.ones((3, 5))}},
            r"shape \(3, 2\), found \(3, 5\)",
        ),
        (lambda p: {"other": p["Dense_0"]}, "params/other/bias: the plan has no such parameter"),
    ],
)
def test_a_train_state_of_another_model_is_refused_in_both_directions(model, params, change, found):
    # Without moments nothing else tells.
    tx = optax.sgd(1e-2)
    state, optimizer = at_start(change(params), tx), nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": params}, model)
    with pytest.raises(port.PortError, match=found):
        plan.apply_optimizer(state, optimizer)
    with pytest.raises(port.PortError, match=found):
        plan.inverse().apply_optimizer(optimizer, state)


def at_start_with_ones(params, tx):
    state = at_start(params, tx)
    return state.replace(opt_state=jax.tree.map(jnp.ones_like, state.opt_state))


def test_moments_of_the_scales_of_a_weight_norm_are_moved_or_refused():
    linen = nn.WeightNorm(nn.Dense(2))
    variables = random_values(shapes_of(linen, X))
    tx = optax.sgd(1e-2, momentum=0.9)
    model = nnx.WeightNorm(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan(variables, model)
    plan.apply_optimizer(at_start(variables["params"], tx), optimizer)
    state = at_start_with_ones(variables["params"], tx)
    if isinstance(model.scales[("kernel",)], nnx.Param):
        plan.apply_optimizer(state, optimizer)
        moments = jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))
        assert sum(np.size(x) for x in moments if np.all(x == 1)) == 8 + 2 + 2
        again = plan.inverse().apply_optimizer(optimizer, at_start(variables["params"], tx))
        assert exact(again.opt_state) == exact(state.opt_state)
    else:
        # In this version of Flax scales are bare arrays, which no optimizer updates.
        with pytest.raises(port.PortError, match=r"scales\.kernel has no place"):
            plan.apply_optimizer(state, optimizer)


def test_moments_of_parameters_that_nnx_does_not_train_are_not_dropped():
    tx = optax.sgd(1e-2, momentum=0.9)
    variables = random_values(shapes_of(nn.Dense(2), X))
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    optimizer = nnx.Optimizer(model, tx, wrt=kernels)
    plan = port.plan(variables, model)
    # While the moments are zero, nothing is lost.
    plan.apply_optimizer(at_start(variables["params"], tx), optimizer)
    with pytest.raises(port.PortError, match="bias has no place"):
        plan.apply_optimizer(at_start_with_ones(variables["params"], tx), optimizer)

    cell = nn.GRUCell(3)
    variables = random_values(shapes_of(cell, jnp.ones((2, 3)), jnp.ones((2, 4))))
    state = at_start_with_ones(variables["params"], tx)
    model = nnx.GRUCell(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(port.PortError, match="params/hn/bias is not zero"):
        port.plan(variables, model).apply_optimizer(state, optimizer)


def test_state_shaped_unlike_its_parameters_is_refused_where_it_is_cut(model, params):
    plan = port.plan({"params": params}, model)
    tx = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=2))
    state = at_start(params, tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(port.PortError, match="cannot be cut"):
        plan.apply_optimizer(state, optimizer)


def test_the_direction_of_a_plan_says_which_state_is_which(model, params):
    tx = optax.adam(1e-2)
    state = at_start(params, tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plan = port.plan({"params": state.params}, model)
    with pytest.raises(bridge.ConversionError, match="inverse"):
        plan.apply_optimizer(optimizer, state)
    with pytest.raises(bridge.ConversionError):
        plan.apply_optimizer(state, tx)
    with pytest.raises(bridge.ConversionError):
        plan.inverse().apply_optimizer(state, optimizer)
