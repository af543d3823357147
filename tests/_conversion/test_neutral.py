"""Where leaves go in a tree without collections, and how they find back."""

import flax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge._conversion.neutral import Leaf, by_address, has_leaf, nest, place, unplace

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
def test_an_empty_mapping_stands_for_an_empty_subtree_unless_it_is_in_a_box(leaf, is_empty):
    assert leaf.is_empty is is_empty


def test_a_leaf_has_no_fields_unless_it_gets_some_and_they_cannot_be_changed():
    leaf = Leaf(1)
    assert dict(leaf.fields) == {}
    with pytest.raises(TypeError):
        leaf.fields["tag"] = "shared by every leaf"


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"params": {}},
        {"params": {"a": {}, "b": {"c": {}}}},
        {"params": {"a": {}, "b": {"c": 1}}},
        {"params": flax.core.freeze({"a": {"b": {}}})},
        {"params": flax.core.freeze({"a": {"b": ()}})},
        {"params": {"a": None}},
    ],
)
def test_there_is_a_leaf_where_one_has_an_address(tree):
    assert has_leaf(tree) == bool(by_address(tree))
