"""Arrays, containers and objects have one key if and only if they hold the same."""

import enum
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bridge._equality.contents import contents
from bridge._equality.tell_values import digest


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def key(value, **options):
    found = contents(value, **options)
    assert found.is_complete
    return found.key


ARRAYS = arrays.arrays(
    st.sampled_from((np.int8, np.uint8, np.float32, np.bool_)),
    arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2),
    elements=st.integers(0, 1),
)


@given(ARRAYS, ARRAYS)
def test_two_numpy_arrays_have_one_digest_if_shape_dtype_and_bytes_are_the_same(a, b):
    same = (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    assert (digest(a) == digest(b)) is same
    assert digest(a) == digest(np.asfortranarray(a.copy()).reshape(a.shape))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (1.0, 1),
        (True, 1),
        (complex(1, 0.0), complex(1, -0.0)),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({"a": 1}, {"a": 2}),
        (Color.RED, Color.BLUE),
        (np.float32(1), np.float64(1)),
        (np.array([{}], object), np.array([[]], object)),
        (jnp.dtype("int8"), jnp.dtype("int16")),
        (jax.ShapeDtypeStruct((2,), jnp.int8), jax.ShapeDtypeStruct((3,), jnp.int8)),
        (np.add, np.subtract),
        (jax.tree.structure([1]), jax.tree.structure((1,))),
        (nn.Dense(3), nn.Dense(4)),
        (nnx.Param(3), nnx.Param(4)),
        (nnx.Param(3), nnx.Variable(3)),
        (nnx.Param(3, note=1), nnx.Param(3, note=2)),
        (logging.getLogger("a"), logging.getLogger("b")),
    ],
)
def test_values_that_differ_have_other_keys(a, b):
    assert key(a) == key(a)
    assert key(b) == key(b)
    assert key(a) != key(b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex("nan"),
        lambda: {3, 1, 2},
        lambda: {"a": [1, {"b": (2.5,)}]},
        lambda: np.arange(3),
        lambda: np.float32(2),
        lambda: nn.Dense(3),
        lambda: nnx.Param(3),
        lambda: jax.sharding.PartitionSpec("a"),
    ],
)
def test_equal_values_in_other_objects_have_one_key(make):
    assert key(make()) == key(make())


def test_the_order_of_a_dict_counts_where_that_is_asked_for():
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert key(one) != key(other)
    assert key(one, ordered=False) == key(other, ordered=False)
    # Only texts can be put in order.
    assert key({1: 1, 2: 2}, ordered=False) != key({2: 2, 1: 1}, ordered=False)


def test_a_numpy_array_that_was_written_into_holds_something_else():
    array = np.zeros(3)
    before = contents(array)
    array[0] = 1
    assert contents(array).key != before.key
    assert contents(array).identities == before.identities


def test_an_array_of_jax_is_told_by_identity():
    array = jnp.ones(2)
    assert key(array) == key(array)
    assert key(array) != key(jnp.ones(2))


@pytest.mark.parametrize(
    "value",
    [jax.new_ref(jnp.ones(2)), np.frompyfunc(lambda x: x, 1, 1), nn.Dense(3).bind({})],
    ids=["reference", "ufunc", "bound module"],
)
def test_what_may_change_unseen_is_incomplete(value):
    assert not contents(value).is_complete


def test_a_traced_value_is_incomplete():
    found = []
    jax.eval_shape(lambda x: found.append(contents(x).is_complete), jnp.ones(2))
    assert found == [False]


def test_a_lock_is_itself():
    lock = threading.Lock()
    assert key(lock) == key(lock)
    assert key(lock) != key(threading.Lock())
