"""Leaves find their places in a tree without collections, and the way back."""

import flax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bridge
from bridge._conversion.neutral import (
    Leaf,
    as_dicts,
    by_address,
    laid_over,
    nest,
    place,
    unplace,
    walk,
)

# Few, and the same for collections and keys, so that everything collides.
NAMES = st.sampled_from(("params", "batch_stats", "b", "w"))
KEYS = NAMES | st.sampled_from((0, 1, "1"))


def paths(min_size=0):
    return st.lists(KEYS, min_size=min_size, max_size=3).map(tuple)


def is_prefix(a, b):
    return b[: len(a)] == a


def prefix_free(found):
    """The paths without those that meet, cover or lie below an earlier one: leaves of one tree."""
    kept = []
    for path in found:
        if not any(is_prefix(path, other) or is_prefix(other, path) for other in kept):
            kept.append(path)
    return kept


def trees(min_size=0):
    return st.lists(paths(min_size), max_size=4).map(prefix_free)


@st.composite
def leaf_addresses(draw):
    """The addresses of the leaves of some collections."""
    collections = draw(st.lists(NAMES, unique=True, max_size=4))
    return [(name, path) for name in collections for path in draw(trees())]


@given(leaf_addresses(), trees(min_size=1))
@example([("params", ("b",)), ("b", ("b",))], [])
@example([("params", ("b",)), ("b", ())], [])
@example([("params", ("b",)), ("b", ("b", "w"))], [])
@example([("b", ("w",))], [("w",), ("b",)])
@example([("params", ("w",)), ("params", ("b", 0)), ("b", ("w",)), ("w", ("b", 0))], [])
def test_every_leaf_gets_a_place_that_no_other_leaf_meets_or_covers(addresses, occupied):
    placed = place(addresses, occupied)
    assert list(placed) == addresses or sorted(placed, key=repr) == sorted(addresses, key=repr)
    taken = [*occupied, *(target for target, _ in placed.values())]
    assert all(taken)
    assert prefix_free(taken) == taken


@given(leaf_addresses(), trees(min_size=1))
@example([("params", ("b",)), ("b", ("b",))], [])
def test_unplace_is_the_inverse_of_place(addresses, occupied):
    for (_, path), (target, displaced) in place(addresses, occupied).items():
        assert unplace(target, displaced) == path


@given(leaf_addresses(), paths())
@example([("params", ("b",)), ("b", ("b",))], ("b",))
def test_a_leaf_finds_back_when_its_tree_is_part_of_another_one(addresses, above):
    for (_, path), (target, displaced) in place(addresses).items():
        assert unplace((*above, *target), displaced) == (*above, *path)


@given(leaf_addresses(), trees(min_size=1), st.randoms(use_true_random=False))
@example([("b", ("w",)), ("b", ("b", "w")), ("params", ("w",))], [], None)
def test_the_order_of_the_leaves_does_not_matter(addresses, occupied, random):
    shuffled = addresses[::-1]
    if random is not None:
        random.shuffle(shuffled)
    assert place(shuffled, occupied) == place(addresses, occupied)


@given(leaf_addresses())
def test_leaves_that_do_not_collide_stay_at_their_paths(addresses):
    for address, (target, _) in place(addresses).items():
        path = address[1]
        others = [p for _, p in addresses]
        others.remove(path)
        if path and not any(is_prefix(path, o) or is_prefix(o, path) for o in others):
            assert target == path


@given(leaf_addresses())
def test_params_keeps_its_place(addresses):
    for (collection, path), (target, _) in place(addresses).items():
        if collection == "params" and path:
            assert target == path


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (
            [("batch_stats", ("w",)), ("params", ("w",))],
            {("params", ("w",)): ("w",), ("batch_stats", ("w",)): ("batch_stats", "w")},
        ),
        (
            [("c", ("w",)), ("b", ("w",)), ("a", ("w",))],
            {
                ("a", ("w",)): ("w",),
                ("b", ("w",)): ("b", "w"),
                ("c", ("w",)): ("c", "w"),
            },
        ),
        (
            [("params", ("w",)), ("batch_stats", ("w", "mean"))],
            {
                ("params", ("w",)): ("w",),
                ("batch_stats", ("w", "mean")): ("batch_stats", "w", "mean"),
            },
        ),
        (
            [("params", ("w", "kernel")), ("batch_stats", ("w",))],
            {
                ("params", ("w", "kernel")): ("w", "kernel"),
                ("batch_stats", ("w",)): ("batch_stats", "w"),
            },
        ),
        ([("batch_stats", ())], {("batch_stats", ()): ("batch_stats",)}),
    ],
    ids=["two collections", "three collections", "leaf above subtree", "below", "empty collection"],
)
def test_a_colliding_leaf_goes_below_the_name_of_its_collection(addresses, expected):
    assert {a: target for a, (target, _) in place(addresses).items()} == expected


@given(leaf_addresses())
def test_nest_makes_what_flax_makes_of_paths(addresses):
    flat = {target: address for address, (target, _) in place(addresses).items()}
    assert nest(flat) == flax.traverse_util.unflatten_dict(flat)


@pytest.mark.parametrize(
    ("leaf", "is_empty"),
    [
        (Leaf({}), True),
        (Leaf({}, box=dict), False),
        (Leaf(()), False),
        (Leaf([]), False),
        (Leaf(None), False),
        (Leaf(0), False),
    ],
)
def test_an_empty_mapping_outside_of_a_box_is_an_empty_subtree(leaf, is_empty):
    assert leaf.is_empty is is_empty


def test_a_leaf_has_only_the_fields_it_is_given_and_they_cannot_change():
    leaf = Leaf(1)
    assert dict(leaf.fields) == {}
    with pytest.raises(TypeError):
        leaf.fields["tag"] = "shared by every leaf"


@pytest.mark.parametrize(
    "flat",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", "b"): 2, ("a",): 1},
        {("a",): {}, ("a", "b"): 2},
        {("a", "b"): {"c": 1}, ("a", "b", "c"): 2},
        {("a", "b", "c"): 1, ("a", "b"): 2},
    ],
)
def test_a_leaf_above_another_one_is_an_error_that_names_the_second(flat):
    *_, second = flat
    with pytest.raises(bridge.ConversionError, match=rf"leaf.* {'/'.join(second)}$"):
        nest(flat)


def test_nest_makes_dicts_of_its_own_around_the_leaves_themselves():
    leaf = {"inner": 1}
    nested = nest({("a", "b"): leaf, ("a", 0): 2, ("c",): 3})
    assert nested == {"a": {"b": leaf, 0: 2}, "c": 3}
    assert nested["a"]["b"] is leaf
    assert nest({}) == {}


NESTED = st.recursive(
    st.integers() | st.just(()),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
).filter(lambda tree: isinstance(tree, dict))


@given(NESTED, st.booleans())
def test_walk_finds_what_flax_finds(tree, empty):
    flat = flax.traverse_util.flatten_dict(tree, keep_empty_nodes=empty)
    no_leaf = flax.traverse_util.empty_node
    expected = {path: {} if leaf is no_leaf else leaf for path, leaf in flat.items()}
    if empty and not tree:
        expected = {(): {}}
    found = walk(tree, empty=empty)
    assert dict(found) == expected
    assert len(found) == len(expected)
    assert dict(walk(flax.core.freeze(tree), empty=empty)) == expected


@given(NESTED)
def test_addresses_are_the_paths_split_after_the_collection(tree):
    flat = flax.traverse_util.flatten_dict({"params": tree, "cache": tree})
    expected = {(path[0], path[1:]): leaf for path, leaf in flat.items()}
    assert by_address({"params": tree, "cache": flax.core.freeze(tree)}) == expected


@given(NESTED)
def test_dicts_of_their_own_hold_the_same_leaves(tree):
    frozen = flax.core.freeze(tree)
    assert as_dicts(frozen) == tree
    assert type(as_dicts(frozen)) is dict
    assert as_dicts(tree) is not tree
    leaf = [{}]
    assert as_dicts({"a": leaf})["a"] is leaf
    assert type(as_dicts({"a": frozen})["a"]) is dict


@given(NESTED, NESTED)
def test_of_two_trees_the_one_laid_over_wins_at_a_leaf(old, new):
    merged = laid_over(old, new)
    flat = dict(walk(merged, empty=True))
    for path, leaf in walk(new):
        assert flat[path] == leaf
    covered = {path[:depth] for path, _ in walk(new, empty=True) for depth in range(len(path) + 1)}
    for path, leaf in walk(old):
        if not any(path[:depth] in dict(walk(new)) for depth in range(len(path) + 1)):
            assert path in covered or flat[path] == leaf
    assert laid_over(merged, new) == merged
    assert laid_over(old, {}) == old
    assert laid_over({}, new) == new


def test_laying_over_changes_neither_tree():
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": {"e": 4}}, "d": {"f": 5}}
    before = as_dicts(old), as_dicts(new)
    merged = laid_over(old, new)
    assert merged == {"a": {"b": {"e": 4}, "c": 2}, "d": {"f": 5}}
    merged["a"]["g"] = 6
    assert (old, new) == before


def test_the_name_of_a_collection_is_lengthened_until_it_bars_no_way():
    occupied = [("w",), ("cache", "w"), ("cache_",)]
    (((target, displaced)),) = place([("cache", ("w",))], occupied).values()
    assert target == ("cache__", "w")
    assert unplace(target, displaced) == ("w",)


def test_the_first_collection_by_name_keeps_the_place_if_not_params():
    placed = place([("b", ("w",)), ("a", ("w",)), ("c", ("w",))])
    assert {address: target for address, (target, _) in placed.items()} == {
        ("a", ("w",)): ("w",),
        ("b", ("w",)): ("b", "w"),
        ("c", ("w",)): ("c", "w"),
    }


@pytest.mark.parametrize(
    ("path", "occupied", "target"),
    [
        (("a", "b", "c"), ("a", "b"), ("a", "cache", "b", "c")),
        (("a", "b", "c"), ("a",), ("cache", "a", "b", "c")),
        (("a", "b"), ("a", "b", "c"), ("a", "cache", "b")),
        (("a",), ("a", "b", "c"), ("cache", "a")),
        ((), ("a",), ("cache",)),
        ((), ("cache",), ("cache_",)),
        ((), ("cache", "a"), ("cache_",)),
    ],
)
def test_the_name_goes_in_where_the_two_meet(path, occupied, target):
    ((found, displaced),) = place([("cache", path)], [occupied]).values()
    assert found == target
    assert unplace(found, displaced) == path
