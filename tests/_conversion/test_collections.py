"""Some collections hold state, and the bridge's own names are free."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import variablelib

import bridge
from bridge._conversion.collections import ARRAYS, GRAPHDEF, OUTPUTS, STATIC, holds_state

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


class Everything(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
        count = self.variable("counts", "calls", jnp.zeros, ())
        if not self.is_initializing():
            count.value += 1
        self.sow("intermediates", "out", x)
        return self.perturb("out", x)


def test_state_is_what_training_carries_from_call_to_call():
    variables = Everything().init(KEY, X)
    _, updates = Everything().apply(variables, X, mutable=True)
    assert {"params", "batch_stats", "counts", *OUTPUTS} == updates.keys() | variables.keys()
    # Linen gives a perturbation back as it was, and a parameter too.
    plain = {name: tree for name, tree in updates.items() if name != "intermediates"}
    moved = {
        name
        for name, tree in plain.items()
        if not jax.tree.all(jax.tree.map(jnp.array_equal, tree, variables[name]))
    }
    assert {name for name in updates if holds_state(name)} == moved == {"batch_stats", "counts"}


@pytest.mark.parametrize("name", [STATIC, ARRAYS])
def test_flax_has_no_collection_of_the_bridge_s_names(name):
    # Another test may have shown Flax the bridge's own type of that name.
    known = variablelib.VariableTypeCache
    assert known["params"] is nnx.Param
    assert name not in known or known[name].__module__ == "registry.auto"


def test_a_definition_is_where_the_names_say():
    variables = bridge.to_linen(nnx.Linear, 3, 2).init(KEY, X)
    assert isinstance(variables[STATIC][GRAPHDEF], nnx.GraphDef)
