"""Two arrays agree within their tolerance, and the text says by how much others differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.parity import Tolerance
from bridge.parity._numbers import TOLERANCES, compare, table_of

TABLE = table_of({})
FLOATS = {
    "float64": np.dtype("float64"),
    "float32": jnp.dtype("float32"),
    "float16": jnp.dtype("float16"),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "float8": jnp.dtype(jnp.float8_e4m3fn),
    "complex64": jnp.dtype("complex64"),
}


def compared(a, b, **options):
    return compare("here", a, b, TABLE, **options)


@pytest.mark.parametrize("name", FLOATS)
def test_a_few_roundings_are_tolerated_and_a_tenth_of_the_range_is_not(name):
    dtype = FLOATS[name]
    rtol = TOLERANCES[name.replace("complex64", "float32")].rtol
    eps = float(jnp.finfo(dtype).eps)
    # The table is about the dtype's own precision: some roundings, and never half of the digits.
    assert eps < rtol < max(np.sqrt(eps), 2.1 * eps)
    a = np.array([1.0, 2.0, 4.0]).astype(dtype)
    near = np.array([1.0, 2.0, 4.0 + 2 * eps]).astype(dtype)
    far = np.array([1.0, 2.0 + 8 * rtol, 4.0]).astype(dtype)

    assert compared(a, a).verdict == "bitwise"
    assert compared(a, near).ok
    assert compared(a, far).verdict == "differs"
    assert compared(a, far).index == (1,)


def test_the_measure_is_the_array_and_not_the_element():
    a = np.array([1.0, 1e-7], np.float32)

    # The second element is all rounding beside the first one.
    assert compared(a, np.array([1.0, -1e-7], np.float32)).verdict == "close"
    assert compared(a[1:], -a[1:]).verdict == "differs"


def test_a_floor_makes_noise_small_beside_other_arrays():
    noise = np.array([3e-9, -2e-9], np.float32)

    assert compared(noise, -noise).verdict == "differs"
    assert compared(noise, -noise, floor=1.0).verdict == "close"


def test_numbers_are_those_of_the_largest_difference():
    a = np.array([[1.0, -8.0], [2.0, 3.0]], np.float32)
    b = np.array([[1.0, -8.5], [2.25, 3.0]], np.float32)

    found = compared(a, b)

    assert (found.max_abs, found.max_rel, found.index) == (0.5, 0.5 / 8, (0, 1))
    assert found.values == ("-8", "-8.5")
    assert found.shapes == ((2, 2), (2, 2))
    assert found.dtypes == ("float32", "float32")
    assert found.tolerance == TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.array([1, 2], np.int32), np.array([1, 3], np.int32)),
        (np.array([2**60], np.int64), np.array([2**60 + 1], np.int64)),
        (np.array([True, False]), np.array([True, True])),
        (np.array([255, 0], np.uint8), np.array([0, 0], np.uint8)),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jnp.zeros((), jnp.uint32)),
        (np.zeros(3, np.float32), np.zeros((3, 1), np.float32)),
        ("text", "other"),
        (None, np.zeros(3, np.float32)),
    ],
    ids=[
        "int",
        "large",
        "bool",
        "unsigned",
        "key",
        "key kind",
        "no key",
        "shape",
        "text",
        "no array",
    ],
)
def test_what_is_no_float_is_compared_exactly(a, b):
    assert compared(a, a).verdict == "bitwise"
    assert compared(b, b).verdict == "bitwise"
    assert compared(a, b).verdict == "differs"
    assert compared(b, a).verdict == "differs"


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_positions_of_what_is_not_finite_are_compared_exactly(special):
    a = np.array([1.0, special, 2.0], np.float32)
    near = np.array([np.nextafter(np.float32(1), np.float32(2)), special, 2.0], np.float32)
    finite = np.array([1.0, 2.0, 2.0], np.float32)

    assert compared(a, near).verdict == "close"
    for x, y in [(a, finite), (finite, a), (a, np.roll(a, 1))]:
        found = compared(x, y)
        assert found.verdict == "differs"
        assert found.max_abs == np.inf
    assert compared(a, finite).index == (1,)
    assert compared(np.array([np.inf], np.float32), np.array([-np.inf], np.float32)).index == (0,)


def test_another_dtype_is_a_difference_with_numbers_unless_told_otherwise():
    a, b = np.float32([1.0, 2.0]), jnp.array([1.0, 2.0], jnp.bfloat16)

    assert (compared(a, b).verdict, compared(a, b).max_abs) == ("differs", 0.0)
    assert compared(a, b).note == "another dtype"
    # The looser of the two tolerances.
    assert compared(a, b * 1.01, dtypes=False).verdict == "close"
    assert compared(a, a * 1.01, dtypes=False).verdict == "differs"


def test_minus_zero_is_not_bitwise_zero():
    assert compared(np.float32([0.0]), np.float32([-0.0])).verdict == "close"


def test_arrays_without_elements_are_equal():
    empty = np.zeros((0, 3), np.float32)

    assert compared(empty, empty).verdict == "bitwise"
    assert compared(empty, empty.astype(np.float64), dtypes=False).verdict == "close"


def test_tolerances_are_overridden_by_dtype():
    a, b = np.float32([1.0]), np.float32([1.001])

    assert not compare("", a, b, TABLE).ok
    assert compare("", a, b, table_of({"float32": 1e-2})).ok
    assert compare("", a, b, table_of({jnp.float32: Tolerance(0.0, atol=1e-2)})).ok
    assert not compare("", a, b, table_of({jnp.bfloat16: 1e-2})).ok
    assert compare("", np.int32([1]), np.int32([2]), table_of({"int32": Tolerance(0, 1)})).ok


def test_sharded_arrays_are_compared_as_a_whole():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    a = np.arange(16, dtype=np.float32)
    b = a.copy()
    b[13] += 1

    sharded = [
        jax.device_put(v, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        for v in (a, b)
    ]

    assert compared(sharded[0], a).verdict == "bitwise"
    assert compared(*sharded).index == (13,)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=6),
    st.lists(st.floats(width=32), min_size=1, max_size=6),
)
@settings(max_examples=25)
def test_the_verdict_is_that_of_the_rule_written_element_by_element(a, b):
    """Reference: the rule as a loop over Python floats."""
    a, b = (np.array(v[: min(len(a), len(b))], np.float32) for v in (a, b))
    scale = max([abs(float(x)) for x in a if np.isfinite(x)], default=0.0)

    def agree(x, y):
        if not (np.isfinite(x) and np.isfinite(y)):
            return x == y or (np.isnan(x) and np.isnan(y))
        return abs(float(x) - float(y)) <= 1e-5 * scale

    found = compared(a, b)

    assert found.ok == all(agree(x, y) for x, y in zip(a, b, strict=True))
    assert (found.verdict == "bitwise") == (a.tobytes() == b.tobytes())
