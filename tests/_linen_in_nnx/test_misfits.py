"""How inputs do not fit the variables of a Linen module."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import bridge
from bridge._conversion.linen_attributes import held_variables
from bridge._linen_in_nnx.misfits import mismatch, shapes
from tests.models import LinenClassifier, LinenMLP, assert_identical

KEY = jax.random.key(0)
X = jnp.ones((4, 3))


def test_the_shapes_are_those_of_linens_init():
    expected = jax.eval_shape(LinenMLP().init, KEY, X)
    assert_identical(shapes(LinenMLP(), LinenMLP.__call__, (X,), {}), expected)
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert_identical(shapes(LinenMLP(), LinenMLP.__call__, (abstract,), {}), expected)


def test_static_inputs_stay_static():
    found = shapes(LinenClassifier(), LinenClassifier.__call__, (X,), {"train": True})
    assert set(found) == {"params", "batch_stats"}


def test_an_input_may_have_any_name():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, rngs, method):
            return nn.Dense(method)(rngs)

    found = shapes(Named(), Named.__call__, (), {"rngs": X, "method": 2})
    assert found["params"]["Dense_0"]["kernel"].shape == (3, 2)


def test_inputs_that_do_not_fit_the_module_have_no_shapes():
    assert shapes(LinenMLP(), LinenMLP.__call__, (), {}) is None
    assert mismatch(LinenMLP(), LinenMLP.__call__, (), {}, {}, "here") is None


def test_variables_that_other_inputs_made_are_listed_with_the_inputs():
    model = bridge.ToNNX(nn.Dense(2), KEY).lazy_init(X)
    held = held_variables(model)
    function = nn.Dense.__call__
    assert mismatch(nn.Dense(2), function, (X,), {}, held, "here") is None
    error = mismatch(nn.Dense(2), function, (jnp.ones((1, 5)),), {}, held, "here")
    assert error.mis_shaped == (("params/kernel", "float32[5, 2]", "float32[3, 2]"),)
    assert "here called with (float32[1, 5])" in str(error)
