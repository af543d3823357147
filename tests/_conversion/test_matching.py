"""Everything that does not fit a module is in one error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._conversion.matching import compare, inputs_text, same_shape, shape_text

SHAPES = st.sampled_from(((), (2,), (2, 3)))
ADDRESSES = st.tuples(
    st.sampled_from(("params", "batch_stats")),
    st.lists(st.sampled_from(("kernel", "Dense_0", 0)), min_size=1, max_size=2).map(tuple),
)
SHAPES_BY_ADDRESS = st.dictionaries(ADDRESSES, SHAPES, max_size=5)


def abstract(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def variables_of(shapes, dtype=jnp.float32):
    return {address: abstract(shape, dtype) for address, shape in shapes.items()}


@given(SHAPES_BY_ADDRESS, SHAPES_BY_ADDRESS)
def test_every_address_is_told_missing_mis_shaped_unknown_or_fitting(expected, found):
    compared = compare(variables_of(expected), variables_of(found))
    assert compared.missing == tuple(a for a in expected if a not in found)
    assert compared.unknown == tuple(a for a in found if a not in expected)
    assert compared.mis_shaped == tuple(
        a for a in expected if a in found and expected[a] != found[a]
    )
    assert compared.fits == (not compared.missing and not compared.mis_shaped)


@given(SHAPES_BY_ADDRESS)
def test_what_is_expected_fits_whatever_its_dtype(shapes):
    assert compare(variables_of(shapes), variables_of(shapes, jnp.bfloat16)).fits


@given(SHAPES_BY_ADDRESS, SHAPES_BY_ADDRESS)
def test_one_error_lists_every_problem_with_its_path(expected, found):
    compared = compare(variables_of(expected), variables_of(found))
    error = compared.error("ToLinen(Model)")
    message = str(error)
    for collection, path in (*compared.missing, *compared.mis_shaped, *compared.unknown):
        assert "/".join([collection, *map(str, path)]) in message
    assert len(error.missing) == len(compared.missing)
    assert len(error.mis_shaped) == len(compared.mis_shaped)
    assert len(error.unknown) == len(compared.unknown)


def test_a_mismatch_says_path_expected_found_and_where():
    expected = {
        ("params", ("Dense_0", "kernel")): abstract((2, 3)),
        ("params", ("Dense_0", "bias")): abstract((3,)),
    }
    found = {
        ("params", ("Dense_0", "kernel")): jnp.ones((3, 2), jnp.bfloat16),
        ("params", ("Dense_1", 0)): jnp.ones(3),
    }
    error = compare(expected, found).error("ToLinen(Model)")
    assert error.missing == (("params/Dense_0/bias", "float32[3]"),)
    assert error.mis_shaped == (("params/Dense_0/kernel", "float32[2, 3]", "bfloat16[3, 2]"),)
    assert error.unknown == ("params/Dense_1/0",)
    message = str(error)
    for said in (
        "ToLinen(Model)",
        "params/Dense_0/bias: missing, expected float32[3]",
        "params/Dense_0/kernel: expected float32[2, 3], found bfloat16[3, 2]",
        "params/Dense_1/0: not in the module",
    ):
        assert said in message


@pytest.mark.parametrize(
    "caught_today",
    [
        ValueError,
        flax_errors.ScopeParamShapeError,
        flax_errors.ScopeParamNotFoundError,
        flax_errors.FlaxError,
        bridge.BridgeError,
    ],
)
def test_a_mismatch_is_what_a_user_of_flax_catches_today(caught_today):
    assert isinstance(compare({("params", ("w",)): abstract(())}, {}).error("M"), caught_today)


def test_unknown_paths_alone_fit():
    compared = compare({}, {("params", ("w",)): abstract(())})
    assert compared.fits
    assert compared.unknown_paths() == ["params/w"]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (jnp.ones((2, 3)), np.zeros((2, 3), np.int8), True),
        (jnp.ones((2, 3)), abstract((2, 3)), True),
        (jnp.ones((2, 3)), jnp.ones((3, 2)), False),
        (jnp.ones(()), 1.0, True),
        (jnp.ones((1,)), 1.0, False),
        ((jnp.ones(2), jnp.ones(3)), (jnp.zeros(2), jnp.zeros(3)), True),
        ((jnp.ones(2), jnp.ones(3)), (jnp.ones(3), jnp.ones(2)), False),
        ((jnp.ones(2),), [jnp.ones(2)], False),
        ((jnp.ones(2),), (jnp.ones(2), jnp.ones(2)), False),
        ((jnp.ones(2),), jnp.ones(2), False),
        ({"a": jnp.ones(2)}, {"a": jnp.zeros(2)}, True),
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, False),
        (None, None, True),
        (None, jnp.ones(2), False),
        ((), (), True),
        (jax.random.key(0), jax.random.key(1), True),
        (jax.random.key(0), jax.random.split(jax.random.key(0)), False),
    ],
)
def test_leaves_have_the_same_shape_if_structure_and_shapes_agree(a, b, same):
    assert same_shape(a, b) is same
    assert same_shape(b, a) is same


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.ones((2, 3)), "float32[2, 3]"),
        (abstract((), jnp.int32), "int32[]"),
        (np.zeros(3, np.int8), "int8[3]"),
        (jax.random.key(0), "key<fry>[]"),
        (nnx.Param(jnp.ones(2)), "float32[2]"),
        ((jnp.ones(2), abstract((3,))), "tuple of (float32[2], float32[3])"),
    ],
)
def test_a_message_shows_dtype_and_shape(value, text):
    assert shape_text(value) == text


def test_a_message_names_the_type_of_what_has_no_shape():
    assert shape_text(3.0) == "float of (float)"
    assert shape_text([jnp.ones(2), True]) == "list of (float32[2], bool)"


@jax.tree_util.register_static
class Shaped:
    """Has a shape and no dtype, so it is no array."""

    shape = (2,)


def test_what_has_a_shape_and_no_dtype_is_shown_by_its_type():
    assert shape_text(Shaped()) == "Shaped of ()"


def test_a_comparison_cannot_be_changed():
    compared = compare({}, {})
    with pytest.raises(AttributeError):
        compared.missing = ()


def test_addresses_come_in_the_order_of_what_was_compared():
    names = [("params", (name,)) for name in "badc"]
    compared = compare(dict.fromkeys(names, abstract((2,))), {names[1]: abstract(())})
    assert compared.missing == (names[0], *names[2:])
    assert compared.mis_shaped == (names[1],)
    assert compare({}, dict.fromkeys(names)).unknown == tuple(names)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((), "()"),
        ((jnp.ones((2, 3)),), "(float32[2, 3])"),
        (({"x": np.zeros(2, np.int8)}, True, "mode"), "(int8[2], bool, str)"),
    ],
)
def test_a_message_shows_the_inputs_of_a_call(inputs, text):
    assert inputs_text(inputs) == text
    assert inputs_text(iter(inputs)) == text
