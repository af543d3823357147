"""Metadata boxes inside of a dict that is one variable's value keep their names on the NNX side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import bridge
from bridge._conversion.inner_boxes import boxed, unboxed_within

X = np.ones((1, 3), np.float32)


def value():
    return {
        "a": nn.Partitioned(jnp.ones((4, 3)), ("model", None)),
        "b": [nn.LogicallyPartitioned(jnp.zeros(2), ("embed",)), jnp.ones(2)],
        "c": {},
    }


@pytest.mark.parametrize("kind", [nnx.Param, nnx.BatchStat])
def test_the_boxes_come_back(kind):
    variable = unboxed_within(kind(value()))
    held = jax.tree.leaves(variable.get_value())
    assert len(held) == 3
    assert all(isinstance(leaf, jax.Array) for leaf in held)
    assert jax.tree.structure(boxed(variable)) == jax.tree.structure(value())
    copied = nnx.merge(*nnx.split(nnx.Dict(a=variable))).a
    assert jax.tree.structure(boxed(copied)) == jax.tree.structure(value())


def test_a_model_with_a_dict_of_boxes_is_created_in_its_shards():
    def make(b):
        class Model(b.Module):
            @b.compact
            def __call__(self, x):
                return x @ self.param("w", lambda key: value())["a"].T

        return Model

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    model = bridge.init_sharded(
        lambda rngs: make(bridge)(rngs=rngs),
        mesh,
        X,
        rngs=jax.random.key(0),
        rules=[("embed", "data")],
    )
    found = jax.tree.map(lambda leaf: leaf.sharding, model.w.get_value())
    held = model.w.get_value()
    specs = nn.get_partition_spec(make(nn)().init(jax.random.key(0), X))["params"]["w"]
    expected = nn.logical_to_mesh_sharding(specs, mesh, [("embed", "data"), ("model", "model")])
    assert jax.tree.all(
        jax.tree.map(lambda a, b, leaf: a.is_equivalent_to(b, leaf.ndim), found, expected, held)
    )
