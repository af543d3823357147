"""Filters of collections are checked, and can be made to take more collections."""

import pytest
from flax.core.scope import DenyList, Scope, in_filter
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._flax.filters import checked, union

NAMES = ("params", "batch_stats", "cache")
COLLECTIONS = st.lists(st.sampled_from(NAMES), max_size=3)


def forms(names):
    return [names, tuple(names), set(names), dict.fromkeys(names), DenyList(tuple(names))]


@given(COLLECTIONS)
def test_a_filter_admits_what_it_admits_in_linen(names):
    for form in forms(names):
        for name in NAMES:
            assert in_filter(checked(form, "here"), name) == in_filter(form, name)


@pytest.mark.parametrize("value", [None, True, False, "params", DenyList("params"), DenyList(True)])
def test_what_cannot_change_is_taken_as_it_is(value):
    assert checked(value, "here") is value


def test_a_list_that_changes_later_changes_nothing():
    names = ["params"]
    found = checked(names, "here")
    names.append("cache")
    assert found == ("params",)


@pytest.mark.parametrize("value", [0, 1.5, [1], ["params", None], DenyList([1]), object(), b"x"])
def test_what_names_no_collections_is_an_error_that_names_the_place(value):
    with pytest.raises(bridge.InvalidFilterError, match=r"^the call expected mutable") as caught:
        checked(value, "the call")
    assert caught.value.found is value


PLAIN = st.one_of(
    st.booleans(), st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES)).map(tuple)
)
FILTERS = st.recursive(PLAIN, lambda inner: inner.map(DenyList), max_leaves=4)


@given(FILTERS, st.lists(st.sampled_from(NAMES)))
def test_the_union_of_a_filter_and_names_takes_what_either_takes(mutable, names):
    both = union(mutable, names)
    for collection in NAMES:
        is_taken = in_filter(mutable, collection) or collection in names
        assert in_filter(both, collection) == is_taken


def test_a_scope_runs_with_the_union_of_two_filters():
    mutable = union(DenyList(["params", "cache"]), ["cache"])
    scope = Scope({}, {}, mutable=mutable)
    assert [scope.is_mutable_collection(name) for name in NAMES] == [False, True, True]
