"""An `nnx.Rngs` has the streams of a call for as long as the call lasts."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bridge._flax.passed_values import PassedValues
from bridge._graphdefs import static_graphdef
from bridge._nnx_in_linen.lent_streams import lend
from tests.models import assert_identical

KEY = jax.random.key(5)


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.rngs = rngs


def lent(streams, names, seed=lambda leaf: KEY):
    model = Model(rngs=streams)
    graphdef, leaves = static_graphdef.split(model)
    held = list(zip(leaves, graphdef.slots, strict=True))
    return model, lend([model.rngs], held, names, seed)


@pytest.mark.parametrize("stand_in", ["default", "params"])
def test_a_missing_stream_draws_the_keys_of_a_native_stream_with_the_call_s_key(stand_in):
    model, found = lent(nnx.Rngs(**{stand_in: 0}), ["dropout"])
    native = nnx.Rngs(dropout=KEY)
    for _ in range(2):
        assert_identical(model.rngs.dropout(), native.dropout())
    assert [stream.name for stream in found] == ["dropout"]


def test_it_says_where_the_stream_would_be_in_linen_variables():
    asked = []

    def seed(leaf):
        asked.append((leaf.address, leaf.metadata["tag"]))
        return KEY

    _, (stream,) = lent(nnx.Rngs(0), ["noise"], seed)
    assert asked == [(("RngKey", ("rngs", "noise", "key")), "noise")]
    assert stream.address == asked[0][0]


@pytest.mark.parametrize("draws", [0, 1])
def test_taking_it_back_leaves_the_streams_as_they_were_and_says_whether_it_was_used(draws):
    model, (stream,) = lent(nnx.Rngs(0), ["dropout"])
    expected = nnx.state(Model(rngs=nnx.Rngs(0)))
    for _ in range(draws):
        model.rngs.dropout()
    assert stream.take_back(PassedValues()) is bool(draws)
    assert_identical(nnx.state(model), expected)


def test_nothing_is_lent_where_nothing_is_missing():
    assert lent(nnx.Rngs(params=0, dropout=1), ["dropout"])[1] == []
    assert lent(nnx.Rngs(0), [])[1] == []
    # Without a stream that would stand in, a draw is an error as natively.
    assert lent(nnx.Rngs(noise=0), ["dropout"])[1] == []
    assert lent(nnx.Rngs(0), ["dropout"], lambda leaf: None)[1] == []


def test_streams_of_slices_get_a_key_for_each_slice():
    model, _ = lent(nnx.Rngs(0).split(3), ["dropout"])
    assert_identical(model.rngs.dropout.key.get_value(), jax.random.split(KEY, 3))
    drawn = jax.vmap(jax.random.bits)(model.rngs.dropout.key.get_value())
    assert len(set(jnp.asarray(drawn).tolist())) == 3
