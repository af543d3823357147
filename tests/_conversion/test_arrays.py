"""The arrays in a call's inputs, apart from what is static in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge._conversion.arrays import Arrays, is_taken, taken
from bridge._types import is_shaped
from tests.models import assert_identical

ARRAYS = st.sampled_from((jnp.ones(2), np.arange(3), jax.ShapeDtypeStruct((2, 3), jnp.int8)))
STATIC = st.sampled_from((True, None, 3, "text", 2.5))
TREES = st.recursive(
    ARRAYS | STATIC,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@given(TREES)
def test_a_tree_comes_back_from_its_arrays_with_others_in_their_places(tree):
    arrays = Arrays(tree)
    assert arrays.values == [leaf for leaf in jax.tree.leaves(tree) if is_shaped(leaf)]
    assert [(a.shape, a.dtype) for a in arrays.avals] == [(v.shape, v.dtype) for v in arrays.values]
    back = arrays.tree(arrays.values)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))
    numbers = arrays.tree(list(range(len(arrays.values))))
    assert jax.tree.map(lambda leaf: -1 if is_shaped(leaf) else leaf, tree) == jax.tree.map(
        lambda new, old: -1 if is_shaped(old) else new, numbers, tree
    )


def test_arrays_of_another_number_do_not_fit():
    with pytest.raises(ValueError, match="argument"):
        Arrays((jnp.ones(2), True)).tree([])


def test_a_traced_value_is_an_array():
    assert_identical(jax.jit(lambda x: is_shaped(x) * x)(jnp.ones(2)), jnp.ones(2))


def test_a_taken_value_is_still_itself_until_it_is_changed():
    value = {"a": [jnp.ones(2)], "b": np.zeros(2)}
    before = taken(value)
    assert is_taken(value, before)
    assert before is not value
    value["a"].append(jnp.ones(3))
    assert not is_taken(value, before)
    assert len(before["a"]) == 1


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (jnp.ones(2), jnp.ones(2)),
        (jnp.ones(2), [jnp.ones(2)]),
        ([], jnp.ones(2)),
        ((1, 2), [1, 2]),
        ([jnp.ones(2)], [jnp.ones(2)]),
    ],
)
def test_equal_arrays_and_other_containers_are_other_values(value, other):
    assert is_taken(value, taken(value))
    assert not is_taken(other, taken(value))
