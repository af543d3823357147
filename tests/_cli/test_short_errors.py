"""What the command line changes of JAX while it traces a model, and for whom."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer

from bridge._cli._short_errors import short_sharding_errors

OWN = vars(Tracer)["sharding"]
JAX_TEXT = "The error occurred while tracing the function"


def sharding_error():
    """What the property of a traced array raises, which `Tracer.__getattr__` then hides."""
    texts = []

    def trace(x):
        with pytest.raises(AttributeError, match=r"use `jax\.typeof"):
            _ = (x + 1).sharding
        assert getattr(x, "sharding", None) is None
        with pytest.raises(AttributeError) as raised:
            vars(Tracer)["sharding"].fget(x + 1)
        texts.append(str(raised.value))
        return x

    jax.eval_shape(trace, jnp.ones(2))
    return texts[0]


def test_a_tracer_has_no_sharding_with_a_short_message_and_afterwards_with_that_of_jax():
    assert JAX_TEXT in sharding_error()
    with short_sharding_errors():
        assert sharding_error().endswith("has no sharding")
        # Within one another, as a target may run a command.
        with short_sharding_errors():
            assert sharding_error().endswith("has no sharding")
        assert sharding_error().endswith("has no sharding")
    assert JAX_TEXT in sharding_error()
    assert vars(Tracer)["sharding"] is OWN


def test_the_property_is_back_after_an_error():
    with pytest.raises(ZeroDivisionError), short_sharding_errors():
        _ = 1 / 0
    assert vars(Tracer)["sharding"] is OWN


def test_arrays_have_their_sharding_all_the_same():
    with short_sharding_errors():
        assert jnp.ones(2).sharding.device_set == {jax.devices()[0]}


def test_other_threads_get_the_error_of_jax_and_leave_in_any_order():
    inside, may_leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    found = {}

    def use(number):
        with short_sharding_errors():
            inside.wait(10)
            found[number] = sharding_error()
            may_leave[number].wait(10)

    threads = [threading.Thread(target=use, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    assert JAX_TEXT in sharding_error()
    # The first to come is the first to go, so neither restores what the other one set.
    for thread, event in zip(threads, may_leave, strict=True):
        event.set()
        thread.join(10)
        assert JAX_TEXT in sharding_error()
    assert all(text.endswith("has no sharding") for text in found.values())
    assert vars(Tracer)["sharding"] is OWN
