"""The parts of a Linen module are found by binding it.

A call of it is one of the whole Linen module, so that its updates are kept.
"""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._linen_in_nnx.parts import (
    At,
    below,
    bound_at,
    has_any,
    is_own_attribute,
    part_names,
    run_at,
)
from tests.models import LinenAutoencoder, LinenMLP, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


@pytest.fixture
def model():
    return bridge.ToNNX(LinenAutoencoder(), KEY).lazy_init(X)


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
    assert has_any(value, nn.Module) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("encode", True), ("__call__", True), ("features", True), ("apply", False), ("nope", False)],
)
def test_a_class_attribute_is_the_models_own_if_linen_has_another(name, expected):
    assert is_own_attribute(LinenAutoencoder, name) is expected


Y = jnp.arange(6.0).reshape(2, 3)


class Inner(nn.Module):
    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False)

    def __call__(self, x):
        return self.norm(x)

    def scaled(self, x, *, method=2.0):
        return method * self.norm(x)


class Outer(nn.Module):
    def setup(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x)


class Lazy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def with_statistics():
    return bridge.ToNNX(Outer(), nnx.Rngs(0), mutable=["batch_stats"]).lazy_init(Y)


def test_output_and_updates_are_those_of_linen_s_apply():
    wrapper = with_statistics()
    variables = wrapper.linen_variables()
    y = run_at(("inner",), "__call__", wrapper, Y)
    expected, updates = Outer().apply(
        variables, Y, method=lambda m, x: m.inner(x), mutable=["batch_stats"]
    )
    assert_identical(y, expected)
    assert_identical(wrapper.linen_variables(), {**variables, **updates})


def test_a_method_may_have_an_argument_called_method():
    wrapper = with_statistics()
    once = run_at(("inner",), "__call__", with_statistics(), Y)
    assert_identical(run_at(("inner",), "scaled", wrapper, Y, method=4.0), 4.0 * once)


def test_the_signature_is_that_of_the_submodule_s_method():
    bound = Inner()
    function = At(("inner",), "scaled", bound, {})
    assert inspect.signature(function) == inspect.signature(Inner.scaled)
    assert not hasattr(At(("inner",), "scaled", None, {}), "__wrapped__")


def test_a_submodule_that_only_a_call_makes_cannot_be_called():
    wrapper = bridge.ToNNX(Lazy(), nnx.Rngs(0)).lazy_init(Y)
    with pytest.raises(bridge.InvalidMethodError, match="Lazy has no method 'Dense_0'"):
        run_at(("Dense_0",), "__call__", wrapper, Y)
