"""Slots tell where every leaf of a GraphDef is in Linen variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import bridge
import registry
from bridge._graphdefs import static_graphdef
from tests.models import assert_identical

KEY = jax.random.key(0)


class Model(nnx.Module):
    """A list, so that a key is an integer, statistics and a stream of keys."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


def addresses(active):
    """The addresses as the registry and the paths in the module say, in the order of the state."""
    state = nnx.to_flat_state(nnx.state(Model(rngs=nnx.Rngs(0))))
    return [(active.name_from_type(type(variable)), path) for path, variable in state]


def slots():
    return static_graphdef.split(Model(rngs=nnx.Rngs(0)))[0].slots


def test_the_slots_are_in_the_order_of_the_leaves():
    assert [slot.address for slot in slots()] == addresses(registry.current())


def test_a_scoped_registry_names_the_collections():
    with registry.use(registry.current().extend({"weights": nnx.Param}, overwrite=True)):
        assert [slot.address for slot in slots()] == addresses(registry.current())
        assert "weights" in {collection for collection, _ in slots().addresses}
    assert "params" in {collection for collection, _ in slots().addresses}


def with_scale(variables, leaf):
    params = variables["params"]
    return {**variables, "params": {**params, "norm": {**params["norm"], "scale": leaf}}}


def with_strings(variables):
    layers = {str(key): tree for key, tree in variables["params"]["layers"].items()}
    return {**variables, "params": {**variables["params"], "layers": layers}}


@pytest.mark.parametrize(
    "change",
    [
        lambda v: with_scale(v, nn.Partitioned(v["params"]["norm"]["scale"], (None,))),
        lambda v: with_scale(v, np.asarray(v["params"]["norm"]["scale"])),
        with_strings,
        FrozenDict,
    ],
    ids=["a box", "a NumPy array", "strings for integers", "a FrozenDict"],
)
def test_other_forms_of_the_variables_make_the_native_call(change):
    module = bridge.to_linen(Model)
    x = jnp.ones((4, 2))
    variables = nn.unbox(module.init(KEY, x))
    y, updates = module.apply(change(variables), x, mutable=["batch_stats", "RngCount"])
    native = Model(rngs=nnx.Rngs(KEY))
    assert_identical(y, native(x))
    assert_identical(nn.unbox(updates["batch_stats"]["norm"]["mean"]), native.norm.mean[...])
    count = native.dropout.rngs.count[...]
    assert_identical(nn.unbox(updates["RngCount"]["dropout"]["rngs"]["count"]), count)
