"""A Linen module can be initialised where the mesh has Explicit axes."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import bridge
from tests._sharding.sharded_models import mesh
from tests.models import assert_close, assert_identical

KEY = jax.random.key(0)


@pytest.mark.parametrize("eager", [True, False])
def test_variables_are_made_where_the_mesh_has_explicit_axes(eager):
    names = ("data", "model")
    module = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))
    x = jnp.ones((2, 4))
    model = bridge.ToNNX(module, KEY, eager_sharding=eager)
    with jax.set_mesh(mesh("explicit")):
        model.lazy_init(x)
        output = model(x)
        kernel = model.linen_variables()["params"]["kernel"]
    expected = module.init(KEY, x)
    assert kernel.names == names
    assert any(kernel.value.sharding.spec) is eager
    assert_identical(nn.unbox(model.linen_variables()), nn.unbox(expected))
    assert_close(output, module.apply(expected, x))
