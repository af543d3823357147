"""A call of a ToNNX changes nothing before it is committed; pure Linen is the reference."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._linen_in_nnx.linen_call import LinenCall
from tests.models import assert_identical

X = jnp.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


def model(**options):
    return bridge.ToNNX(Net(), nnx.Rngs(0), **options).lazy_init(X)


def call(wrapper, *args, rngs=None, mutable=None, method=None, capture=False):
    return LinenCall(
        wrapper, method, args, {}, rngs=rngs, mutable=mutable, capture_intermediates=capture
    )


def test_a_call_writes_when_it_is_committed_and_not_before():
    wrapper = model()
    variables, key = wrapper.linen_variables(), jax.random.key(1)
    before = jax.tree.map(jnp.copy, nnx.state(wrapper))
    prepared = call(wrapper, X, rngs={"dropout": key}, mutable=["batch_stats"])
    y = prepared.run()
    assert_identical(nnx.state(wrapper), before)
    prepared.commit()
    expected, updates = Net().apply(variables, X, rngs={"dropout": key}, mutable=["batch_stats"])
    assert_identical(y, expected)
    assert_identical(wrapper.linen_variables(), {**variables, **updates})


def test_only_the_streams_that_linen_used_move_on():
    wrapper = model()
    counts = {name: int(s.count[...]) for name, s in wrapper.to_nnx__rngs.items()}
    prepared = call(wrapper, X, mutable=["batch_stats"], method=lambda m, x: m.make_rng("noise"))
    prepared.run()
    prepared.commit()
    after = {name: int(s.count[...]) for name, s in wrapper.to_nnx__rngs.items()}
    assert after == {**counts, "default": counts["default"] + 1}


@pytest.mark.parametrize(
    ("inputs", "options", "error"),
    [
        ((X,), {"mutable": False}, bridge.ImmutableCollectionError),
        ((jnp.ones((2, 5)),), {"mutable": True}, bridge.MismatchError),
    ],
)
def test_an_error_of_flax_becomes_one_that_says_what_to_do(inputs, options, error):
    wrapper = model()
    before = nnx.state(wrapper)
    prepared = call(wrapper, *inputs, **options)
    with pytest.raises(Exception, match=r".") as caught:
        prepared.run()
    assert not isinstance(caught.value, bridge.BridgeError)
    assert isinstance(prepared.explained(caught.value), error)
    assert_identical(nnx.state(wrapper), before)


def test_before_there_are_variables_the_error_says_how_to_create_them():
    prepared = call(bridge.ToNNX(Net(), nnx.Rngs(0)), X)
    with pytest.raises(Exception, match=r".") as caught:
        prepared.run()
    assert isinstance(prepared.explained(caught.value), bridge.NotInitializedError)


def test_an_error_of_the_model_itself_says_it_all():
    def fail(module, x):
        raise ZeroDivisionError

    prepared = call(model(), X, method=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        prepared.run()
    assert prepared.explained(caught.value) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "absent"}, bridge.InvalidMethodError),
        ({"mutable": 3}, bridge.InvalidFilterError),
        ({"rngs": "dropout"}, bridge.InvalidRngsError),
    ],
)
def test_what_cannot_be_is_refused_before_linen_runs(options, error):
    with pytest.raises(error):
        call(model(), X, **options)
