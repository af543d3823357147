"""Flax's own msgpack files of variables that the bridge made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import checkpoints

import bridge
from bridge import checkpoint
from tests.checkpoint.migrating_models import INPUTS, LinenModel, linen_variables, to_nnx_model
from tests.strategies import exact


class Noisy(nnx.Module):
    """Parameters with a sharding, statistics, layers by number, and RNG streams."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        # The constructor would shard an annotated Param at once, which needs a mesh.
        self.kernel = nnx.Param(init(rngs.params(), (3, 4)), tag="kernel")
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x @ self.kernel
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


class Mixed(nn.Module):
    """Linen boxes beside the collections of a wrapped NNX module."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(3, kernel_init=init)(x)
        logical = nn.with_logical_partitioning(nn.initializers.ones, (None, "embed"))
        x = x * self.param("scale", logical, (1, 3))
        return bridge.to_linen(Noisy)(x)


MUTABLE = ["batch_stats", "RngCount"]


def init(key):
    module = Mixed()
    variables = module.init({"params": key, "dropout": jax.random.split(key)[0]}, INPUTS)
    # A step, so that counts and statistics are not those of a fresh model.
    return {**variables, **module.apply(variables, INPUTS, mutable=MUTABLE)[1]}


@pytest.fixture(scope="module", params=["threefry2x32", "rbg"])
def impl(request):
    return request.param


@pytest.fixture(scope="module")
def variables(impl):
    return init(jax.random.key(0, impl=impl))


@pytest.fixture(scope="module")
def fresh(impl):
    return init(jax.random.key(1, impl=impl))


def test_to_bytes_and_from_bytes_keep_every_bit_of_every_collection(variables, fresh):
    assert {"nnx", "params", "batch_stats", "RngKey", "RngCount"} == set(variables)
    before = exact(variables), exact(fresh)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(variables))
    assert (exact(variables), exact(fresh)) == before
    assert values(restored) == values(variables)
    assert restored["nnx"]["ToLinen_0"]["graphdef"] is fresh["nnx"]["ToLinen_0"]["graphdef"]
    expected, updates = Mixed().apply(variables, INPUTS, mutable=MUTABLE)
    found, others = Mixed().apply(restored, INPUTS, mutable=MUTABLE)
    np.testing.assert_array_equal(found, expected)
    assert values(others) == values(updates)


def test_a_state_dict_in_memory_comes_back_too(variables, fresh):
    restored = serialization.from_state_dict(fresh, serialization.to_state_dict(variables))
    assert values(restored) == values(variables)


def test_a_restored_dict_without_any_target_applies(variables):
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    del restored["nnx"], restored["RngKey"], restored["RngCount"]
    # Boxes are subtrees in it, and numbers are strings.
    layers = restored["params"]["ToLinen_0"]["layers"]
    assert set(layers) == {str(index) for index in range(11)}
    unboxed = {"params": {**restored["params"]}, "batch_stats": restored["batch_stats"]}
    unboxed["params"]["scale"] = restored["params"]["scale"]["value"]
    unboxed["params"]["Dense_0"]["kernel"] = restored["params"]["Dense_0"]["kernel"]["value"]
    kernel = unboxed["params"]["ToLinen_0"]["kernel"]["value"]
    unboxed["params"]["ToLinen_0"]["kernel"] = kernel
    rngs = {"dropout": jax.random.key(5)}
    bare = nn.unbox({name: variables[name] for name in ("params", "batch_stats")})
    expected = Mixed().apply(bare, INPUTS, rngs=rngs, mutable=["batch_stats"])[0]
    found = Mixed().apply(unboxed, INPUTS, rngs=rngs, mutable=["batch_stats"])[0]
    np.testing.assert_array_equal(found, expected)


def test_flax_training_checkpoints_save_and_restore(variables, fresh, tmp_path):
    checkpoints.save_checkpoint(str(tmp_path), variables, step=9)
    checkpoints.save_checkpoint(str(tmp_path), variables, step=10)
    restored = checkpoints.restore_checkpoint(str(tmp_path), fresh)
    assert values(restored) == values(variables)
    latest = checkpoints.latest_checkpoint(str(tmp_path))
    again = checkpoint.restore(latest, fresh, rngs=True)
    assert exact(again) == exact(variables)


def test_the_bridge_reads_the_bytes_with_keys_and_boxes(variables, fresh, tmp_path):
    (tmp_path / "file").write_bytes(serialization.to_bytes(variables))
    assert exact(checkpoint.restore(tmp_path / "file", fresh, rngs=True)) == exact(variables)


def test_a_state_of_another_form_is_refused():
    box = bridge.NNXMeta(nnx.Param, jnp.ones(2), {})
    with pytest.raises(ValueError, match="'value'"):
        serialization.from_state_dict(box, {"content": jnp.ones(2)})


def test_an_abstract_box_of_keys_has_a_state_too():
    keys = bridge.NNXMeta(nnx.RngKey, jax.random.key(3), {"tag": "dropout"})
    content = serialization.to_bytes(keys)
    abstract = jax.eval_shape(lambda: keys)
    assert serialization.to_state_dict(abstract)["value"].shape == (2,)
    assert exact(serialization.from_bytes(abstract, content)) == exact(keys)


def test_the_state_of_a_wrapped_linen_model_goes_through_bytes_both_ways():
    variables = linen_variables()
    model = bridge.ToNNX.from_variables(LinenModel(), variables)
    pure = nnx.to_pure_dict(nnx.state(model))
    restored = serialization.from_bytes(pure, serialization.to_bytes(pure))
    other = to_nnx_model(seed=8)
    state = nnx.state(other, nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, restored))
    nnx.update(other, state)
    np.testing.assert_array_equal(other(INPUTS), LinenModel().apply(variables, INPUTS))
    content = serialization.to_bytes(other.linen_variables())
    back = serialization.from_bytes(linen_variables(seed=3), content)
    assert values(back) == values(variables)


def values(tree):
    """Everything but who holds the arrays: msgpack makes NumPy arrays of them."""

    def as_jax(leaf):
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return exact(jax.tree.map(as_jax, {k: v for k, v in tree.items() if k != "nnx"}))
