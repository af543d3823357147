"""Generated classes do on `bridge.Module` what they do on Linen's base class and on the peer's."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as peer
from flax.traverse_util import flatten_dict
from hypothesis import given

import bridge
from tests._linen_style_module.generated_classes import X, blocks, model
from tests.drawing import drawing

# The bodies are Linen's, where this is how a variable is written.
pytestmark = pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")

EXAMPLES = drawing(25)
KEYS = {"params": 0, "noise": 1}


def arrays(variables):
    return {path: np.asarray(x).tolist() for path, x in flatten_dict(variables).items()}


def shapes(variables):
    return {path: np.shape(np.asarray(x)) for path, x in flatten_dict(variables).items()}


def linen_keys():
    return {name: jax.random.key(seed) for name, seed in KEYS.items()}


@EXAMPLES
@given(blocks(for_peer=True))
def test_values_outputs_and_updates_are_the_peers(block):
    theirs, ours = model(block, peer.Module), model(block, bridge.Module)
    expected_y, expected = theirs.init_with_output(dict(KEYS), X)
    y, variables = ours.init_with_output(dict(KEYS), X)
    assert arrays(variables) == arrays(expected)
    assert np.array_equal(y, expected_y)
    expected_y, expected_updates = theirs.apply(expected, X, rngs=dict(KEYS), mutable=["stats"])
    y, updates = ours.apply(variables, X, rngs=dict(KEYS), mutable=["stats"])
    assert np.array_equal(y, expected_y)
    # The peer returns the other collections too.
    assert arrays(updates) == arrays({c: x for c, x in expected_updates.items() if c == "stats"})


@EXAMPLES
@given(blocks(noise=False))
def test_paths_outputs_and_updates_are_linens(block):
    theirs, ours = model(block, nn.Module), model(block, bridge.Module)
    expected_y, expected = theirs.init_with_output(linen_keys(), X)
    variables = ours.init(dict(KEYS), X)
    assert shapes(variables) == shapes(expected)
    expected_y, expected_updates = theirs.apply(expected, X, mutable=["stats"])
    y, updates = ours.apply(expected, X, mutable=["stats"])
    assert np.array_equal(y, expected_y)
    assert arrays(updates) == arrays(expected_updates)


@EXAMPLES
@given(blocks())
def test_a_module_that_keeps_its_variables_does_what_apply_does(block):
    variables = model(block, bridge.Module).init(dict(KEYS), X)
    kept = bridge.lazy_init(_with_rngs(model(block, bridge.Module)), X)
    assert arrays(kept.variables) == arrays(variables)
    for _ in range(2):
        bound = model(block, bridge.Module).bind(variables, rngs=dict(KEYS))
        pure = model(block, bridge.Module)
        expected_y, updates = pure.apply(variables, X, rngs=dict(KEYS), mutable=["stats"])
        assert np.array_equal(bound(X), expected_y)
        variables = {**variables, **updates}
        assert arrays(bound.variables) == arrays(variables)
    # NNX's own tools see Linen's paths.
    assert set(flatten_dict(nnx.to_pure_dict(nnx.state(kept, nnx.Param)))) == set(
        flatten_dict(variables.get("params", {}))
    )


def _with_rngs(module):
    module.bridge__rngs = nnx.Rngs(**KEYS)
    return module
