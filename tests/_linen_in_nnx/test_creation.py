"""What initialising a Linen module makes where the mesh has Explicit axes."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from bridge._flax.scopes import CallKeys
from bridge._linen_in_nnx.creation import created
from tests._sharding.sharded_models import mesh
from tests.models import assert_identical

KEY = jax.random.key(0)


@pytest.mark.parametrize("eager", [True, False])
def test_variables_are_made_where_the_mesh_has_explicit_axes(eager):
    names = ("data", "model")
    module = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, names))
    x = jnp.ones((2, 4))

    def run(variables, keys, x, kwargs):
        rngs = {name: keys.key(name) for name in keys.names}
        return None, module.init(rngs, *x), {"params"}

    with jax.set_mesh(mesh("explicit")):
        found = created(run, {}, CallKeys({"params": KEY}), (x,), {}, eager=eager)
        kernel = found.updates["params"]["kernel"]
    expected = module.init(KEY, x)
    assert found.used == {"params"}
    assert kernel.names == names
    assert any(kernel.value.sharding.spec) is eager
    assert_identical(nn.unbox(found.updates), nn.unbox(expected))
    assert_identical(found.variables, nn.unbox(expected))
