"""Any mixture of a model computes what the model of one kind computes."""

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

import bridge
from tests.drawing import drawing
from tests.nesting import generated_models
from tests.nesting.generated_models import STATE, X

# What a native module sows without `nnx.capture` is compared here too.
pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")

# Eager, with kernels of one shape: an example compiles nothing new.
EXAMPLES = drawing(60)


@EXAMPLES
@given(generated_models.trees(), st.lists(st.booleans(), min_size=1, max_size=3))
def test_a_mixture_in_a_linen_program_equals_pure_linen(tree, trainings):
    pure, mixed = tree.as_kind(is_linen=True).linen(), tree.linen()
    expected = _kept(pure.init(jax.random.key(0), X, True))
    variables = _kept(mixed.init(jax.random.key(0), X, True))
    assert _arrays(variables) == _arrays(expected)
    for train in trainings:
        expected_y, expected_updates = pure.apply(expected, X, train, mutable=STATE)
        y, updates = mixed.apply(variables, X, train, mutable=STATE)
        assert np.array_equal(y, expected_y)
        assert _arrays(updates) == _arrays(expected_updates)
        expected = {**expected, **_kept(expected_updates)}
        variables = {**variables, **_kept(updates)}
    # The definition is made anew where it does not come along.
    without = {name: tree for name, tree in variables.items() if name != "nnx"}
    y, updates = mixed.apply(without, X, True, mutable=STATE)
    assert np.array_equal(y, pure.apply(expected, X, True, mutable=STATE)[0])


@EXAMPLES
@given(generated_models.trees(), st.lists(st.booleans(), min_size=1, max_size=3))
def test_a_mixture_in_an_nnx_program_equals_pure_nnx(tree, trainings):
    pure, mixed = tree.as_kind(is_linen=False).nnx(), tree.nnx()
    bridge.lazy_init(mixed, X, True)
    assert _state(mixed) == _state(pure)
    for train in trainings:
        assert np.array_equal(mixed(X, train), pure(X, train))
        sown = nnx.pop(mixed, nnx.Intermediate), nnx.pop(pure, nnx.Intermediate)
        assert _state(mixed) == _state(pure)
        del sown


@drawing(20)
@given(generated_models.trees())
def test_gradients_of_a_mixture_equal_those_of_one_kind(tree):
    pure, mixed = tree.as_kind(is_linen=True).linen(), tree.linen()
    expected = _kept(pure.init(jax.random.key(0), X, True))
    variables = _kept(mixed.init(jax.random.key(0), X, True))

    def gradients(module, variables):
        def loss(params):
            return module.apply({**variables, "params": params}, X, True, mutable=STATE)[0].sum()

        return _arrays({"params": jax.grad(loss)(variables.get("params", {}))})

    assert gradients(mixed, variables) == gradients(pure, expected)


def _kept(variables):
    """Variables for the next call: what is sown is an output of one call."""
    return {name: tree for name, tree in variables.items() if name != "intermediates"}


def _arrays(variables):
    """The values of Linen variables by path, without what only a mixture has."""
    own = ("nnx", "RngKey", "RngCount")
    flat = flatten_dict({name: tree for name, tree in variables.items() if name not in own})
    return {path: jax.tree.map(_listed, leaf) for path, leaf in flat.items()}


def _state(module):
    """The values of a module's Variables by path, without RNG streams."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    return {
        path: (variable.var_type, jax.tree.map(_listed, variable.get_value()))
        for path, variable in flat
    }


def _listed(array):
    return np.asarray(array).tolist()
