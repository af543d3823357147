"""A call that writes into Python objects leaves them as they were; `copy.deepcopy` tells how."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from bridge._equality.written_objects import WrittenObjects, can_change

trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


def lists_in(value):
    if isinstance(value, list):
        yield value
    if isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            yield from lists_in(item)


@given(tree=trees, data=st.data())
def test_every_object_holds_again_what_it_held_and_the_copy_what_was_written(tree, data):
    value = [tree]
    before = copy.deepcopy(value)
    written = WrittenObjects([value])
    for one in [*lists_in(value)]:
        if data.draw(st.booleans()):
            one.append("written")
    after = copy.deepcopy(value)
    copied = written.undo()
    assert value == before
    assert copied(value) == after
    # What was left alone is the object itself.
    assert (copied(value) is value) is (after == before)


def test_an_object_in_two_places_is_one_in_the_copies():
    shared = [1]
    first, second = {"a": shared}, {"b": shared}
    written = WrittenObjects([first, second])
    shared.append(2)
    copied = written.undo()
    assert (first, second, shared) == ({"a": [1]}, {"b": [1]}, [1])
    assert copied(first)["a"] is copied(second)["b"]
    assert copied(first)["a"] == [1, 2]


def test_an_object_that_holds_itself_is_put_back():
    value: list = [1]
    value.append(value)
    written = WrittenObjects([value])
    value.append(2)
    copied = written.undo()
    assert len(value) == 2
    assert value[1] is value
    own = copied(value)
    assert own is not value
    assert (own[0], own[2]) == (1, 2)
    assert own[1] is own


def test_objects_that_somebody_else_looks_after_are_left_as_they_are():
    other = [1]
    written = WrittenObjects([other], besides={id(other)})
    other.append(2)
    assert written.undo()(other) is other
    assert other == [1, 2]


def test_a_tuple_can_change_if_it_holds_what_can():
    assert can_change(([],))
    assert not can_change((1, ("a",)))
