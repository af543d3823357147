"""Bridged modules in Flax's own containers: Sequential, RNN, Bidirectional, LoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical
from tests.nesting.nesting_models import X, dense, paths

KEY = jax.random.key(0)
SEQUENCE = jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_linen_sequential_takes_bridged_modules(wrapped):
    module = nn.Sequential([nn.Dense(4), nn.tanh, bridge.to_linen(nnx.Linear, 4, 4), nn.Dense(2)])
    if wrapped:
        model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(X)
        params, output = nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(X)
    else:
        variables = module.init(KEY, X)
        params, output = nn.meta.unbox(variables["params"]), module.apply(variables, X)
    assert sorted(params) == ["layers_0", "layers_2", "layers_3"]
    x = dense(jnp.tanh(dense(X, params["layers_0"])), params["layers_2"])
    assert_identical(output, dense(x, params["layers_3"]))


@pytest.mark.parametrize("wrapped", [False, True])
def test_nnx_sequential_takes_wrapped_modules(wrapped):
    def make(rngs):
        return nnx.Sequential(
            nnx.Linear(4, 4, rngs=rngs),
            jnp.tanh,
            bridge.ToNNX(nn.Dense(4), rngs),
            bridge.ToNNX(nn.Sequential([nn.Dense(2), nn.tanh]), rngs),
        )

    model = bridge.lazy_init(make(nnx.Rngs(0)), X)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))["layers"]
    assert list(params) == [0, 2, 3]
    x = dense(jnp.tanh(dense(X, params[0])), params[2])
    assert_identical(model(X), jnp.tanh(dense(x, params[3]["layers_0"])))
    if wrapped:
        module, variables = bridge.ToLinen.from_module(model)
        assert_identical(module.apply(variables, X), model(X))


CELLS = {"lstm": lambda: nn.LSTMCell(4), "gru": lambda: nn.GRUCell(4)}


@pytest.mark.parametrize("cell", CELLS)
def test_a_wrapped_rnn_is_the_pure_one(cell):
    module = nn.RNN(CELLS[cell](), return_carry=True)
    key = jax.random.key(2)
    model = bridge.ToNNX(module, key).lazy_init(SEQUENCE)
    variables = module.init(key, SEQUENCE)
    assert_identical(model.linen_variables(), variables)
    assert_identical(model(SEQUENCE), module.apply(variables, SEQUENCE))
    lengths = jnp.array([1, 3])
    options = {"seq_lengths": lengths, "reverse": True, "keep_order": True}
    expected = module.apply(variables, SEQUENCE, **options)
    assert_identical(model(SEQUENCE, **options), expected)


@pytest.mark.parametrize("container", ["nnx", "linen"])
def test_a_wrapped_bidirectional_is_the_pure_one(container):
    module = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4)))
    model = bridge.ToNNX(module, jax.random.key(2)).lazy_init(SEQUENCE)
    variables = module.init(jax.random.key(2), SEQUENCE)
    assert_identical(model.linen_variables(), variables)
    expected = module.apply(variables, SEQUENCE)
    if container == "linen":
        outer, outer_variables = bridge.ToLinen.from_module(model)
        assert_identical(outer.apply(outer_variables, SEQUENCE), expected)
    else:
        assert_identical(model(SEQUENCE), expected)


class WrappedCell(nnx.RNNCellBase):
    """A cell of NNX's protocol around a wrapped Linen cell."""

    def __init__(self, features, rngs):
        self.cell = bridge.ToNNX(nn.GRUCell(features), rngs)

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros((*input_shape[:-1], 4))

    def __call__(self, carry, x):
        return self.cell(carry, x)

    @property
    def num_feature_axes(self):
        return 1


def test_nnx_rnn_runs_over_a_wrapped_cell_as_linen_s_rnn_over_the_cell():
    cell = WrappedCell(4, nnx.Rngs(0))
    bridge.lazy_init(cell, jnp.zeros((2, 4)), SEQUENCE[:, 0])
    variables = {"params": {"cell": cell.cell.linen_variables()["params"]}}
    expected = nn.RNN(nn.GRUCell(4)).apply(variables, SEQUENCE)
    assert_identical(nnx.RNN(cell, rngs=nnx.Rngs(0))(SEQUENCE), expected)


class BridgedCell(nn.RNNCellBase):
    """A cell of Linen's protocol around a bridged NNX cell."""

    features: int = 4

    @nn.compact
    def __call__(self, carry, x):
        return bridge.to_linen(nnx.GRUCell, 4, self.features, name="nnx")(carry, x)

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self):
        return 1


def native_rnn(params):
    cell = nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))
    nnx.update(cell, params)
    return nnx.RNN(cell, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("wrapped", [False, True])
def test_linen_s_rnn_runs_over_a_bridged_cell_as_nnx_s_rnn_over_the_cell(wrapped):
    module = nn.RNN(BridgedCell())
    variables = module.init(KEY, SEQUENCE)
    params = nn.meta.unbox(variables["params"])
    if wrapped:
        output = bridge.ToNNX.from_variables(module, variables)(SEQUENCE)
    else:
        output = module.apply(variables, SEQUENCE)
    assert list(params) == ["cell"]
    native = native_rnn(params["cell"]["nnx"])
    np.testing.assert_allclose(output, native(SEQUENCE), rtol=1e-6, atol=1e-6)


def test_linen_s_bidirectional_runs_over_bridged_cells():
    module = nn.Bidirectional(nn.RNN(BridgedCell()), nn.RNN(BridgedCell()))
    variables = module.init(KEY, SEQUENCE)
    params = nn.meta.unbox(variables["params"])
    forward, backward = (native_rnn(params[name]["cell"]["nnx"]) for name in sorted(params)[::-1])
    expected = jnp.concatenate(
        [forward(SEQUENCE), backward(SEQUENCE, reverse=True, keep_order=True)], axis=-1
    )
    assert sorted(params) == ["backward_rnn", "forward_rnn"]
    np.testing.assert_allclose(module.apply(variables, SEQUENCE), expected, rtol=1e-6, atol=1e-6)


class LoRAOver(nnx.Module):
    """A low-rank update of a wrapped Linen layer."""

    def __init__(self, *, rngs):
        self.lora = nnx.LoRA(4, 2, 4, base_module=bridge.ToNNX(nn.Dense(4), rngs), rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


def low_rank(lora, x):
    return x @ lora["lora_a"] @ lora["lora_b"]


def test_lora_around_a_linear_in_linen_has_collections_of_its_own():
    module = bridge.to_linen(nnx.LoRA, 4, 2, 4)
    variables = module.init(KEY, X)
    assert set(variables) >= {"LoRAParam"}
    assert paths(variables["LoRAParam"]) == ["lora_a", "lora_b"]
    lora = jax.tree.map(lambda p: p + 1.0, nn.meta.unbox(variables["LoRAParam"]))
    changed = {**variables, "LoRAParam": lora}
    assert_identical(module.apply(changed, X), low_rank(lora, X))


@pytest.mark.parametrize("in_linen", [False, True])
def test_lora_trains_beside_a_wrapped_layer_that_stays(in_linen):
    model = bridge.lazy_init(LoRAOver(rngs=nnx.Rngs(0)), X)
    nnx.update(model, jax.tree.map(lambda p: p + 0.5, nnx.state(model, nnx.LoRAParam)))
    lora = nnx.to_pure_dict(nnx.state(model.lora, nnx.LoRAParam))
    base = model.lora.base_module.linen_variables()["params"]

    def pure(lora):
        return low_rank(lora, X) + dense(X, base)

    expected = jax.grad(lambda p: (pure(p) ** 2).sum())(lora)
    if in_linen:
        module, variables = bridge.ToLinen.from_module(model)
        collection = bridge.nnx_to_linen(nnx.state(model, nnx.LoRAParam))
        (name,) = collection
        loss = lambda p: (module.apply({**variables, name: p}, X) ** 2).sum()  # noqa: E731
        gradient = nn.meta.unbox(jax.grad(loss)(variables[name]))["lora"]
        assert_identical(module.apply(variables, X), pure(lora))
    else:
        assert_identical(model(X), pure(lora))
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        gradient = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=wrt)(model)
        gradient = nnx.to_pure_dict(gradient)["lora"]
    assert_identical(gradient, expected)
