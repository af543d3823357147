"""Attributes of the NNX module, as a bound ToLinen answers them."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
from bridge._nnx_in_linen.nnx_attributes import NNXSubmodule, linen_method
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


class Encoder(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
        self.size = 3

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nnx.Module):
    kind = "encoder"

    def __init__(self, *, rngs):
        self.encoder = Encoder(rngs=rngs)

    def __call__(self, x):
        return self.encoder(x)

    def encode(self, x):
        return self.encoder(x)

    @property
    def width(self):
        return self.encoder.size

    @property
    def total(self):
        return self.encoder.layers[0].kernel[...].sum()


MODEL = bridge.to_linen(Model)


@functools.cache
def stored():
    """The variables of the model; not made where these tests are only collected."""
    return MODEL.init(KEY, X)


def native():
    return Model(rngs=nnx.Rngs(KEY))


def test_a_call_of_a_submodule_keeps_its_updates():
    y, updates = MODEL.apply(stored(), X, method=lambda m, x: m.encoder(x), mutable=["batch_stats"])
    expected = native()
    assert_identical(y, expected.encoder(X))
    state = nnx.to_pure_dict(nnx.state(expected, nnx.BatchStat))
    assert_identical(jax.tree.leaves(updates), jax.tree.leaves(state))


def test_items_attributes_and_length_are_those_of_the_native_submodule():
    bound = MODEL.bind(stored())
    assert isinstance(bound.encoder, NNXSubmodule)
    assert len(bound.encoder.layers) == len(list(bound.encoder.layers)) == 2
    assert bound.encoder.size == 3
    kernel = bound.encoder.layers[0].kernel.get_value()
    assert_identical(kernel, native().encoder.layers[0].kernel.get_value())
    assert_identical(bound.encoder.layers[0](X), native().encoder.layers[0](X))
    assert repr(bound.encoder).startswith("encoder: Encoder(")
    with pytest.raises(AttributeError, match="absent"):
        _ = bound.encoder.absent


def test_properties_are_computed_from_the_variables():
    bound = MODEL.bind(stored())
    assert bound.width == 3
    assert_identical(bound.total, native().total)


def test_what_needs_no_variables_is_there_before_they_are():
    assert MODEL.width == 3
    assert MODEL.kind == "encoder"
    with pytest.raises(AttributeError, match="total"):
        _ = MODEL.total


@pytest.mark.parametrize(
    "write",
    [
        lambda m: setattr(m.encoder, "size", 4),
        lambda m: m.encoder.layers[0].kernel.set_value(jnp.zeros((3, 3))),
        lambda m: m.encoder.layers[0].kernel.__setitem__(..., 0.0),
    ],
)
def test_a_write_into_what_was_read_is_an_error(write):
    with pytest.raises(bridge.LostUpdateError, match="copy of the module"):
        write(MODEL.bind(stored()))


def test_a_method_is_one_of_the_wrapper():
    method = MODEL.encode
    assert inspect.ismethod(method)
    assert method.__self__ is MODEL
    assert method.__func__.__name__ == linen_method("encode").__name__ == "encode"
    y, _ = MODEL.apply(stored(), X, method=method, mutable=["batch_stats"])
    assert_identical(y, native()(X))
