"""The base class by which other packages know a ToNNX."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._conversion.linen_attributes import CREATED_ATTRIBUTES, OWN_PREFIX, LinenHolder, name_of

X = jnp.ones((2, 3))
OWN = {name for name in LinenHolder.__annotations__ if not name.startswith("_")}


def test_every_attribute_of_its_own_has_the_prefix():
    assert OWN
    assert {name for name in OWN if not name.startswith(OWN_PREFIX)} == set()
    # The others are those of a `bridge.Module`.
    created = {n for n in CREATED_ATTRIBUTES if n.startswith(OWN_PREFIX)}
    assert created == {"to_nnx__graphdefs", "to_nnx__collections"} <= OWN


def test_a_linen_variable_cannot_have_a_name_with_the_prefix():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param(f"{OWN_PREFIX}x", nn.initializers.ones, ())

    with pytest.raises(bridge.ReservedNameError, match=OWN_PREFIX):
        bridge.ToNNX(Named(), jax.random.key(0)).lazy_init(X)


def test_what_stays_as_it_is_by_default_is_no_attribute_of_the_instance():
    model = bridge.ToNNX(nn.Dense(2), nnx.Rngs(0)).lazy_init(X)
    assert OWN & vars(model).keys() == {"to_nnx__module", "to_nnx__rngs"}


def test_its_counts_are_those_of_the_streams_that_were_drawn_from():
    streams = nnx.Rngs(params=0, dropout=1)
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), streams).lazy_init(X)
    before = [int(count[...]) for count in model.stream_counts()]
    model(X)
    after = [int(count[...]) for count in model.stream_counts()]
    assert len(before) == len(list(model.to_nnx__rngs)) == 2
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]
    assert LinenHolder.stream_counts(bridge.ToNNX(nn.Dense(2))) == []


def test_messages_name_the_linen_class():
    assert name_of(bridge.ToNNX(nn.Dense(2))) == "ToNNX(Dense)"
