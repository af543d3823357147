"""A call of an NNX module that was made of Linen variables, against the native module's call."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
from bridge._conversion.neutral import by_address
from bridge._graphdefs import static_graphdef
from bridge._nnx_in_linen.bound_module import BoundModule, Call, Streams, method_of
from bridge._nnx_in_linen.matched_variables import MatchedVariables
from bridge._randomness.streams import fold_path
from tests._nnx_in_linen.called_linen import Called
from tests.models import assert_identical

X = jnp.arange(6.0).reshape(2, 3)


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.steps = nnx.Cache(jnp.zeros(()))

    def __call__(self, x):
        self.steps[...] += 1
        return self.norm(x)

    def without_steps(self, x):
        del self.steps
        return x

    def double(self, x, *, by=2):
        return by * x


class Noisy(nnx.Module):
    def __init__(self, *, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


def bound(module, streams=None, extra=()):
    graphdef, leaves = static_graphdef.split(module)
    values = {
        slot.address: leaf.get_raw_value()
        for slot, leaf in zip(graphdef.slots, leaves, strict=True)
        if not slot.is_rng
    }
    return BoundModule(MatchedVariables(graphdef, {**values, **dict(extra)}), streams)


def called(own):
    output = own.call(Call(None, (X,), {}))
    own.streams.settle(own.changes, "here")
    return output


def raw(updates):
    return {address: item.get_raw_value() for address, item in updates.items()}


def test_output_and_updates_are_those_of_the_native_call():
    module, native = Model(rngs=nnx.Rngs(0)), Model(rngs=nnx.Rngs(0))
    own = bound(module)
    assert_identical(own.call(Call(None, (X,), {})), native(X))
    assert_identical(
        raw(own.changes.updates),
        {
            ("cache", ("steps",)): native.steps.get_value(),
            ("batch_stats", ("norm", "mean")): native.norm.mean.get_value(),
            ("batch_stats", ("norm", "var")): native.norm.var.get_value(),
        },
    )
    assert own.changes.removed == frozenset()
    assert own.changes.definition() is None
    # The call had a module of its own.
    assert_identical(nnx.state(module), nnx.state(Model(rngs=nnx.Rngs(0))))


def test_a_leaf_that_is_gone_natively_is_named():
    own = bound(Model(rngs=nnx.Rngs(0)))
    own.call(Call("without_steps", (X,), {}))
    assert own.changes.removed == {("cache", ("steps",))}
    assert own.changes.updates == {}
    assert own.changes.definition() is not None


def test_a_variable_that_no_leaf_is_for_is_unused_unless_it_was_sown():
    extra = by_address({"params": {"extra": X}, "intermediates": {"seen": (X,)}})
    own = bound(Model(rngs=nnx.Rngs(0)), extra=extra)
    own.call(Call(None, (X,), {}))
    assert own.unused() == [("params", ("extra",))]


def test_a_draw_without_a_key_is_one_error_after_the_call():
    with pytest.raises(bridge.MissingRngError, match="here") as caught:
        called(bound(Noisy(rngs=nnx.Rngs(0))))
    assert caught.value.streams == ("default",)


def test_a_stream_draws_from_the_key_of_the_call_and_is_no_update():
    key = jax.random.key(3)
    linen = Called(key)
    own = bound(Noisy(rngs=nnx.Rngs(0)), Streams(linen, {"default": key}))
    native = Noisy(rngs=nnx.Rngs(0))
    for stream in (native.dropout.rngs,):
        stream.key.set_value(fold_path(key, ("dropout", "rngs")))
    assert_identical(called(own), native(X))
    assert own.changes.updates == {}
    assert linen.rng_counters == {"default": 1}


def test_a_key_that_the_call_does_not_draw_from_is_given_back():
    linen = Called(jax.random.key(3))
    module = Noisy(rngs=nnx.Rngs(0))
    module.eval()
    assert_identical(called(bound(module, Streams(linen, {"default": 0}))), X)
    assert linen.rng_counters == {"default": 0}


def test_a_method_is_named_given_or_called():
    module = Model(rngs=nnx.Rngs(0))
    assert_identical(method_of(module, "double")(X, by=3), 3 * X)
    assert_identical(method_of(module, lambda m, x: m.double(x))(X), 2 * X)
    assert_identical(method_of(module, None)(X), Model(rngs=nnx.Rngs(0))(X))
    with pytest.raises(bridge.InvalidMethodError, match="double") as caught:
        method_of(module, "absent")
    assert caught.value.method == "absent"
