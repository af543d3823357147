"""An `nnx.Rngs` has the streams of a call for as long as the call lasts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bridge._flax.passed_values import PassedValues
from bridge._graphdefs import static_graphdef
from bridge._nnx_in_linen.bound_module import Streams
from bridge._randomness.streams import fold_path
from tests._nnx_in_linen.called_linen import Called
from tests.models import assert_identical

KEY = jax.random.key(5)
# Of the stream at this path.
OF_STREAM = fold_path(KEY, ("rngs", "dropout"))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.rngs = rngs


class Unchanged:
    """A call that has changed nothing."""

    passed = PassedValues()

    def drawn(self, addresses):
        return set()

    def forget(self, addresses):
        pass


def lent(streams, names, *, is_initializing=False):
    model = Model(rngs=streams)
    graphdef, leaves = static_graphdef.split(model)
    linen = Called(KEY, is_initializing=is_initializing)
    found = Streams(linen, dict.fromkeys(names, KEY))
    found.lend([model.rngs], zip(leaves, graphdef.slots, strict=True))
    return model, found, linen


@pytest.mark.parametrize("stand_in", ["default", "params"])
def test_a_missing_stream_draws_as_a_native_stream_of_the_call_s_key(stand_in):
    model, _, linen = lent(nnx.Rngs(**{stand_in: 0}), ["dropout"])
    native = nnx.Rngs(dropout=OF_STREAM)
    for _ in range(2):
        assert_identical(model.rngs.dropout(), native.dropout())
    assert linen.rng_counters == {"dropout": 1}


@pytest.mark.parametrize("draws", [0, 1])
def test_taking_back_a_key_leaves_the_streams_and_says_if_it_was_used(draws):
    model, found, linen = lent(nnx.Rngs(0), ["dropout"])
    expected = nnx.state(Model(rngs=nnx.Rngs(0)))
    for _ in range(draws):
        model.rngs.dropout()
    found.take_back()
    found.settle(Unchanged(), "here")
    # The draw for a stream that was not used is undone.
    assert linen.rng_counters["dropout"] == draws
    assert_identical(nnx.state(model), expected)


@pytest.mark.parametrize(
    ("streams", "names", "is_initializing"),
    [
        (nnx.Rngs(params=0, dropout=1), ["dropout"], False),
        (nnx.Rngs(0), [], False),
        # Without a stream that would stand in, a draw is an error as natively.
        (nnx.Rngs(noise=0), ["dropout"], False),
        (nnx.Rngs(0), ["dropout"], True),
    ],
)
def test_nothing_is_lent_where_nothing_is_missing(streams, names, is_initializing):
    before = set(streams)
    model, _, _ = lent(streams, names, is_initializing=is_initializing)
    assert set(model.rngs) == before


def test_streams_of_slices_get_a_key_for_each_slice():
    model, _, _ = lent(nnx.Rngs(0).split(3), ["dropout"])
    assert_identical(model.rngs.dropout.key.get_value(), jax.random.split(OF_STREAM, 3))
    drawn = jax.vmap(jax.random.bits)(model.rngs.dropout.key.get_value())
    assert len(set(jnp.asarray(drawn).tolist())) == 3
