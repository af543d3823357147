"""What a Linen module has inside, found by binding it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import bridge
from bridge._linen_in_nnx.parts import (
    below,
    bound_at,
    has_modules,
    has_variables,
    is_own_attribute,
    part_names,
)
from tests.models import LinenAutoencoder, LinenMLP, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


@pytest.fixture
def model():
    return bridge.ToNNX(LinenAutoencoder(), KEY).lazy_init(X)


def test_a_wrapper_has_variables_once_it_is_initialised(model):
    assert has_variables(model)
    assert not has_variables(bridge.ToNNX(LinenAutoencoder(), KEY))


@pytest.mark.parametrize("initialised", [True, False])
def test_the_names_are_those_of_the_class_of_setup_and_of_fields(initialised):
    model = bridge.ToNNX(LinenAutoencoder(), KEY)
    found = part_names(bound_at(model.lazy_init(X) if initialised else model, ()))
    own = {"encode", "decode", "features", "name_of_owner"}
    assert found >= own | {"encoder", "decoder", "activation"}
    # What every Linen module has is nobody's own.
    assert not {"apply", "init", "parent", "name", "scope"} & found


def test_a_submodule_has_names_of_its_own(model):
    assert "twice" in part_names(bound_at(model, ("activation",)))
    assert part_names(bound_at(model, ("missing",))) == set()


def test_submodules_that_a_call_makes_are_not_there_outside_of_one():
    model = bridge.ToNNX(LinenMLP(), KEY).lazy_init(X)
    assert "Dense_0" not in part_names(bound_at(model, ()))
    assert bound_at(model, ("Dense_0",)) is None


def test_a_bound_submodule_computes_with_the_wrappers_variables(model):
    expected = LinenAutoencoder().bind(model.linen_variables()).encoder(X)
    assert_identical(bound_at(model, ("encoder",))(X), expected)
    assert bound_at(model, ("missing",)) is None


def test_a_setup_that_reads_variables_is_looked_at_before_there_are_any():
    class Reads(nn.Module):
        def setup(self):
            self.w = self.param("w", nn.initializers.ones, (2,))
            self.inner = nn.Dense(2)

    assert "inner" in part_names(bound_at(bridge.ToNNX(Reads(), KEY), ()))


def test_a_setup_that_fails_has_no_names():
    class Fails(nn.Module):
        def setup(self):
            raise ZeroDivisionError

    assert bound_at(bridge.ToNNX(Fails(), KEY), ()) is None


def test_the_module_at_no_path_is_the_module_itself():
    bound = LinenAutoencoder().bind({})
    assert below(bound, ()) is bound
    assert below(bound, ("encoder",)) is bound.encoder
    assert below(bound, ("features",)) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nn.Dense(1), True),
        ([1, nn.Dense(1)], True),
        ({"a": ({"b": nn.Dense(1)},)}, True),
        ((), False),
        ({"a": [1, "x"]}, False),
        (nn.Dense, False),
    ],
)
def test_modules_are_found_in_containers(value, expected):
    assert has_modules(value) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("encode", True), ("__call__", True), ("features", True), ("apply", False), ("nope", False)],
)
def test_a_class_attribute_is_the_models_own_if_linen_has_another(name, expected):
    assert is_own_attribute(LinenAutoencoder, name) is expected
