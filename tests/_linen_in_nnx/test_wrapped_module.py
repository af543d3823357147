"""A ToNNX takes Linen modules, also bound ones, and shows their fields."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._linen_in_nnx.wrapped_module import check_module, field_names, free_module
from tests.models import LinenAutoencoder, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))
MODULE = LinenAutoencoder(features=7)


def test_a_module_that_is_bound_to_nothing_brings_nothing():
    module = nn.Dense(3)
    assert free_module(module) == (module, {})


def test_a_bound_module_brings_its_variables_and_is_free_again():
    module = LinenAutoencoder()
    variables = module.init(KEY, X)
    free, found = free_module(module.bind(variables))
    assert free == module
    assert free.scope is None
    assert_identical(found, variables)


def test_a_submodule_of_a_bound_module_brings_its_own_part():
    module = LinenAutoencoder()
    variables = module.init(KEY, X)
    free, found = free_module(module.bind(variables).encoder)
    assert free == nn.Dense(2)
    assert_identical(found, {"params": variables["params"]["encoder"]})


def test_a_module_that_is_made_in_a_call_brings_nothing_of_that_call():
    found = []

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            found.append(free_module(nn.Dropout(0.5)))
            return x

    Outer().apply({}, X, rngs={"dropout": KEY})
    assert found == [(nn.Dropout(0.5), {})]


def scaled(module, x):
    return module.features * x


def test_the_fields_of_a_module_are_those_of_its_class():
    assert field_names(MODULE) == {"features", "name_of_owner"}


def test_a_linen_module_is_one():
    assert check_module(MODULE) is None


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        (LinenAutoencoder, "ToNNX(LinenAutoencoder("),
        (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "it is NNX already"),
        (nnx.Linear, "it is NNX already"),
        (3, "pass an instance of a subclass of flax.linen.Module"),
        (scaled, "pass an instance of a subclass of flax.linen.Module"),
    ],
)
def test_what_is_no_linen_module_is_an_error_with_the_remedy(module, hint):
    with pytest.raises(bridge.InvalidModuleError) as caught:
        check_module(module)
    assert hint in str(caught.value)
