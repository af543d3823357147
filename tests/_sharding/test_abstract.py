"""`bridge.abstract`: what `init_sharded` returns, before any array exists."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
from tests._sharding.sharded_models import (
    BUILDS,
    KEY,
    X,
    expected_sharding,
    leaves_by_path,
    linen_init,
    mesh,
    nnx_init,
    uniform,
)
from tests.garbage_collection import earlier_objects_left_out

# Made once: a GraphDef holds the initializers, and functions are equal if they are the same.
WRAPPED_INIT = linen_init("mesh", uniform, "embed", "mlp")
NATIVE_INIT = nnx_init("mesh", uniform, "mlp", "embed")


class Small(nnx.Module):
    """A native matrix and a wrapped one, for what has to be compiled."""

    def __init__(self, rngs):
        self.wrapped = bridge.ToNNX(nn.Dense(8, kernel_init=WRAPPED_INIT), rngs)
        self.native = nnx.Linear(8, 4, kernel_init=NATIVE_INIT, rngs=rngs)

    def __call__(self, x):
        return self.native(self.wrapped(x))


SMALL = {"NNX": Small, "Linen": bridge.to_linen(Small)}
SPECS = {"wrapped/kernel": P("data", "model"), "native/kernel": P("model", "data")}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_it_is_the_initialised_model_with_shapes_for_arrays(name, kind):
    shapes = bridge.abstract(SMALL[name], mesh(kind), X, rngs=KEY)
    model = bridge.init_sharded(SMALL[name], mesh(kind), X, rngs=KEY)
    if name == "NNX":
        assert nnx.graphdef(shapes) == nnx.graphdef(model)
        shapes, model = nnx.state(shapes), nnx.state(model)
    assert jax.tree.structure(shapes) == jax.tree.structure(model)
    for expected, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(model), strict=True):
        assert isinstance(expected, jax.ShapeDtypeStruct)
        assert (expected.shape, expected.dtype) == (array.shape, array.dtype)
        assert expected.sharding == array.sharding


@pytest.mark.parametrize("name", BUILDS)
def test_a_mesh_without_devices_is_enough_and_no_array_is_made(name):
    make, rngs, specs = BUILDS[name]
    on = AbstractMesh((2, 4), ("data", "model"))
    build = make("mesh")
    with earlier_objects_left_out():
        bridge.abstract(build, on, X, rngs=rngs)
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        model = bridge.abstract(build, on, X, rngs=rngs)
        gc.collect()
        assert {id(array) for array in jax.live_arrays()} <= before
    leaves = leaves_by_path(model)
    assert leaves.keys() >= specs.keys()
    for path, leaf in leaves.items():
        assert leaf.sharding.is_equivalent_to(expected_sharding(specs, path, on), len(leaf.shape))


def test_a_model_that_no_machine_holds_has_a_plan():
    huge = nn.Dense(2**20, kernel_init=nn.with_partitioning(uniform, ("data", "model")))
    x = jax.ShapeDtypeStruct((1, 2**20), jnp.float32)
    on = AbstractMesh((64, 128), ("data", "model"))
    kernel = nn.unbox(bridge.abstract(huge, on, x, rngs=KEY))["params"]["kernel"]
    assert kernel.shape == (2**20, 2**20)
    assert kernel.sharding == NamedSharding(on, P("data", "model"))
    assert kernel.sharding.shard_shape(kernel.shape) == (2**14, 2**13)


def test_arrays_can_be_put_where_it_says():
    """What a restore does with its target."""
    shapes = bridge.abstract(Small, mesh(), X, rngs=KEY)
    graphdef, state = nnx.split(shapes)
    rng = np.random.default_rng(0)

    def restored(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = KEY if is_key else rng.integers(0, 9, leaf.shape).astype(leaf.dtype)
        return jax.device_put(value, leaf.sharding)

    state = jax.tree.map(restored, state)
    model = nnx.merge(graphdef, state)
    for path, leaf in leaves_by_path(model).items():
        assert leaf.sharding.is_equivalent_to(expected_sharding(SPECS, path, mesh()), leaf.ndim)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wrapped, native = (jax.tree.map(np.asarray, params[n]) for n in ("wrapped", "native"))
    hidden = X @ wrapped["kernel"] + wrapped["bias"][None]
    expected = hidden @ native["kernel"] + native["bias"][None]
    # Small integers: the sums are the same in any order, up to the inputs' own rounding.
    np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-4)
