"""Arrays come back in the shards of the target, whatever mesh they were saved on."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import bridge
from bridge import checkpoint

AXES = (AxisType.Auto,)
X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def row():
    return jax.make_mesh((8,), ("data",), axis_types=AXES)


@pytest.fixture(scope="module")
def grid():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=AXES * 2)


@pytest.fixture(scope="module")
def path(row, tmp_path_factory):
    """A kernel in eight row blocks and replicated keys."""
    path = tmp_path_factory.mktemp("meshes") / "checkpoint"
    kernel = jax.device_put(X, NamedSharding(row, PartitionSpec("data")))
    keys = jax.device_put(
        jax.random.split(jax.random.key(1), 4), NamedSharding(row, PartitionSpec())
    )
    box = nn.Partitioned(kernel, ("data", None))
    checkpoint.save(path, {"params": {"kernel": box}, "RngKey": {"keys": keys}})
    return path


def abstract(grid, spec, key_spec):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    return {
        "params": {
            "kernel": nn.Partitioned(
                jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(grid, spec)),
                ("model", "data"),
            )
        },
        "RngKey": {
            "keys": jax.ShapeDtypeStruct(
                keys.shape, keys.dtype, sharding=NamedSharding(grid, key_spec)
            )
        },
    }


def test_an_abstract_target_says_the_mesh_and_the_spec(path, grid):
    spec, key_spec = PartitionSpec("model", "data"), PartitionSpec("model")
    restored = checkpoint.restore(path, abstract(grid, spec, key_spec))
    kernel = restored["params"]["kernel"]
    assert kernel.names == ("model", "data")
    assert kernel.value.sharding.is_equivalent_to(NamedSharding(grid, spec), 2)
    assert {shard.data.shape for shard in kernel.value.addressable_shards} == {(2, 4)}
    for shard in kernel.value.addressable_shards:
        np.testing.assert_array_equal(shard.data, X[shard.index])
    keys = restored["RngKey"]["keys"]
    assert keys.sharding.is_equivalent_to(NamedSharding(grid, key_spec), 1)
    expected = jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    np.testing.assert_array_equal(jax.random.key_data(keys), expected)


def test_a_concrete_target_keeps_its_sharding(path, grid):
    sharding = NamedSharding(grid, PartitionSpec(None, "model"))
    target = {"params": {"kernel": jax.device_put(jnp.zeros((8, 8)), sharding)}}
    restored = checkpoint.restore(path, target)["params"]["kernel"]
    assert restored.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(restored, X)


def test_a_module_keeps_its_sharding_and_is_updated_in_place(path, grid):
    sharding = NamedSharding(grid, PartitionSpec("data", "model"))
    model = bridge.ToNNX.from_variables(
        nn.Dense(8, use_bias=False),
        {"params": {"kernel": jax.device_put(jnp.zeros((8, 8)), sharding)}},
    )
    checkpoint.restore(path, model)
    assert model.kernel[...].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(model.kernel[...], X)


def test_a_device_that_was_chosen_stays_and_one_that_was_not_stays_open(path):
    device = jax.devices()[3]
    chosen = {"params": {"kernel": jax.device_put(jnp.zeros((8, 8)), device)}}
    restored = checkpoint.restore(path, chosen)["params"]["kernel"]
    assert restored.sharding == SingleDeviceSharding(device)
    assert restored.committed
    # A committed array could not be combined with sharded inputs.
    for target in ({"params": {"kernel": jnp.zeros((8, 8))}}, None):
        restored = nn.unbox(checkpoint.restore(path, target))["params"]["kernel"]
        assert not restored.committed
        np.testing.assert_array_equal(restored, X)


def test_arrays_are_read_into_their_shards_and_not_whole(path, grid, monkeypatch):
    seen = []
    restore = ocp.PyTreeCheckpointHandler.restore

    def spying(self, directory, args):
        seen.append(args.restore_args["params"]["kernel"])
        return restore(self, directory, args=args)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", spying)
    spec = PartitionSpec("model", "data")
    checkpoint.restore(path, abstract(grid, spec, PartitionSpec()))
    assert [type(args) for args in seen] == [ocp.ArrayRestoreArgs]
    assert seen[0].sharding == NamedSharding(grid, spec)


def test_a_model_trained_on_one_mesh_goes_on_on_another(row, grid, tmp_path):
    """The whole way: both wrappers' boxes give the shardings, and values stay bit for bit."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data"))
            self.body = bridge.ToNNX(nn.Dense(8, kernel_init=init), rngs=rngs)

        def __call__(self, x):
            return self.body(x)

    x = jnp.ones((2, 8))
    model = bridge.lazy_init(Model(nnx.Rngs(0)), x)
    kernel = np.asarray(model.body.kernel[...])
    model.body.kernel[...] = jax.device_put(kernel, NamedSharding(row, PartitionSpec(None, "data")))
    checkpoint.save(tmp_path / "one", model)

    abstract = nnx.eval_shape(lambda: bridge.lazy_init(Model(nnx.Rngs(0)), x))
    state = nnx.state(abstract)
    sharding = NamedSharding(grid, PartitionSpec("model", "data"))

    def placed(aval):
        is_kernel = aval.shape == (8, 8)
        where = sharding if is_kernel else NamedSharding(grid, PartitionSpec())
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where)

    nnx.update(abstract, jax.tree.map(placed, state))
    restored = checkpoint.restore(tmp_path / "one", abstract)
    assert restored.body.kernel[...].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(restored.body.kernel[...], kernel)


def test_a_sharding_that_does_not_divide_a_shape_is_at_fault(tmp_path):
    checkpoint.save(tmp_path / "checkpoint", {"params": {"w": jnp.asarray(X), "b": jnp.ones(3)}})
    mesh = jax.make_mesh((3,), ("data",), axis_types=AXES, devices=jax.devices()[:3])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding),
    }
    with pytest.raises(bridge.CheckpointError, match="the target's shardings") as raised:
        checkpoint.restore(tmp_path / "checkpoint", {"params": target})
    assert "params/w" in str(raised.value)
    assert "params/b" not in str(raised.value)
    assert "damaged" not in str(raised.value)
