"""One look at a value: numbers for objects, headers, and how much is looked at."""

import pytest

from bridge._equality import contents  # noqa: F401 it says how values are told
from bridge._equality.walk import AGAIN, UNKNOWN, Walk, identity


class Plain:
    """An object that can be referred to weakly."""


def walked(value, **options):
    walk = Walk(calls=False, ordered=True, **options)
    walk.run(value)
    return walk


def test_an_object_keeps_its_number_and_no_other_object_ever_gets_it():
    first, second = Plain(), Plain()
    numbers = {identity(first), identity(second)}
    assert len(numbers) == 2
    assert identity(first) in numbers
    for _ in range(20):
        # A new object often gets the memory, and so the id, of one that is gone.
        assert identity(Plain()) not in numbers


@pytest.mark.parametrize("value", [3, "text", (), None])
def test_what_nobody_can_refer_to_weakly_has_no_number(value):
    assert identity(value) is None


def test_a_value_that_holds_itself_is_met_again_and_not_endlessly():
    value = []
    value.append(value)
    assert AGAIN in walked(value).key
    assert walked(value).is_complete


def test_equal_shapes_of_another_sharing_have_other_keys():
    shared = [1]
    assert walked([shared, shared]).key != walked([[1], [1]]).key


@pytest.mark.parametrize("values", [[[], [], []], [[i] for i in range(3)]])
def test_too_many_values_are_incomplete(values):
    assert walked(values, most_values=10).is_complete
    few = walked(values, most_values=1)
    assert not few.is_complete
    assert UNKNOWN in few.key


def test_too_many_parts_are_incomplete():
    assert walked(list(range(10)), most_parts=100).is_complete
    assert not walked([[], list(range(10))], most_parts=5).is_complete


def test_what_may_be_written_into_is_noted_and_what_is_unknown_is_incomplete():
    walk = Walk(calls=False, ordered=True)
    thing = Plain()
    walk.mutable(thing)
    walk.mutable(3)
    assert walk.identities == [identity(thing)]
    assert walk.is_complete
    walk.unknown(thing)
    assert walk.key == [UNKNOWN, identity(thing)]
    assert not walk.is_complete


def test_what_a_header_holds_is_looked_at_next():
    walk = Walk(calls=False, ordered=True)
    walk.header("kind", 2, holds=[1, 2])
    assert walk.key == ["kind", 2]
    assert walk.pending == [1, 2]


def test_an_inner_look_uses_up_the_allowance_of_the_outer_one():
    walk = Walk(calls=False, ordered=True, most_values=4)
    assert walk.inner([[], []]).is_complete
    assert not walk.inner([[], []]).is_complete
