"""Typed PRNG keys and their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge._randomness.typed_keys import from_bits, implementation, is_key, to_bits
from tests.models import assert_identical

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
KEY = jax.random.key(7)


def abstract(value):
    return jax.eval_shape(lambda: value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (KEY, True),
        (jax.random.split(KEY), True),
        (abstract(KEY), True),
        (jax.random.PRNGKey(0), False),
        (jnp.ones(2), False),
        (jax.ShapeDtypeStruct((2,), jnp.uint32), False),
        (np.zeros(2, np.uint32), False),
        (None, False),
    ],
)
def test_typed_keys_are_told_from_everything_else(value, expected):
    assert bool(is_key(value)) is expected


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [None, 3])
def test_keys_come_back_from_the_bits_that_jax_gives_for_them(name, count):
    key = jax.random.key(7, impl=name)
    keys = key if count is None else jax.random.split(key, count)
    bits = to_bits(keys)
    assert_identical(bits, jax.random.key_data(keys))
    for like in (keys, abstract(keys)):
        back = from_bits(like, bits)
        assert jax.random.key_impl(back) == jax.random.key_impl(keys)
        assert_identical(back, keys)
    # Bits of a file are NumPy's.
    assert_identical(from_bits(keys, np.asarray(bits)), keys)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_abstract_keys_have_abstract_bits_and_a_name(name):
    keys = jax.random.key(7, impl=name)
    bits = to_bits(abstract(keys))
    assert isinstance(bits, jax.ShapeDtypeStruct)
    assert_identical(bits, abstract(jax.random.key_data(keys)))
    assert implementation(abstract(keys)) == implementation(keys) == name


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2), "text", None, ()])
def test_what_is_no_key_stays_the_same_object(value):
    assert to_bits(value) is value
    assert from_bits(value, value) is value
    # Bits without keys to be like are numbers.
    assert from_bits(jnp.ones(2), value) is value


@pytest.mark.parametrize("value", [jax.random.key(1), None, {}])
def test_keys_and_what_has_no_dtype_are_no_bits(value):
    assert from_bits(KEY, value) is value
