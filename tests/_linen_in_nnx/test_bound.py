"""What a bound Linen module brings along."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from bridge._linen_in_nnx.bound import bound_state
from tests.models import LinenAutoencoder, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


def test_a_module_that_is_bound_to_nothing_brings_nothing():
    module = nn.Dense(3)
    assert bound_state(module) == (module, {}, None)


def test_a_bound_module_brings_its_variables_and_is_free_again():
    module = LinenAutoencoder()
    variables = module.init(KEY, X)
    found = bound_state(module.bind(variables))
    assert found.module == module
    assert found.module.scope is None
    assert_identical(found.variables, variables)
    assert found.keys is None


def test_a_submodule_of_a_bound_module_brings_its_own_part():
    module = LinenAutoencoder()
    variables = module.init(KEY, X)
    found = bound_state(module.bind(variables).encoder)
    assert found.module == nn.Dense(2)
    assert_identical(found.variables, {"params": variables["params"]["encoder"]})


@pytest.mark.parametrize("names", [("dropout",), ("dropout", "params")])
def test_keys_come_along_even_without_variables(names):
    keys = {name: jax.random.fold_in(KEY, i) for i, name in enumerate(names)}
    found = bound_state(nn.Dropout(0.5).bind({}, rngs=keys))
    assert found.variables == {}
    assert_identical(found.keys, keys)


def test_a_module_that_is_made_in_a_call_brings_nothing_of_that_call():
    found = []

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            found.append(bound_state(nn.Dropout(0.5)))
            return x

    Outer().apply({}, X, rngs={"dropout": KEY})
    assert found == [(nn.Dropout(0.5), {}, None)]
