"""What an object holds, and the same object filled with it again."""

import collections
import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from bridge._equality.object_contents import empty, fill, held_by, is_fixed, is_same, is_writable


@dataclasses.dataclass
class Config:
    width: int
    names: list[str]

    @functools.cached_property
    def total(self):
        return self.width * len(self.names)


class Slotted:
    __slots__ = ("a", "b")


class Counting(dict):
    def __setitem__(self, key, value):
        raise AssertionError("a user's own method ran")


def slotted(a):
    made = Slotted()
    made.a = a
    return made


scalars = st.integers() | st.text(max_size=3)
values = st.one_of(
    st.lists(scalars, max_size=3),
    st.dictionaries(scalars, scalars, max_size=3),
    st.sets(scalars, max_size=3),
    st.binary(max_size=3).map(bytearray),
    st.lists(scalars, max_size=3).map(collections.deque),
    st.lists(scalars, max_size=3).map(lambda items: collections.deque(items, maxlen=4)),
    st.dictionaries(scalars, scalars, max_size=3).map(collections.OrderedDict),
    st.dictionaries(scalars, scalars, max_size=3).map(lambda d: collections.defaultdict(list, d)),
    st.builds(Config, st.integers(), st.lists(st.text(max_size=2), max_size=2)),
)


@given(value=values)
def test_an_empty_object_that_is_filled_equals_the_first(value):
    held = held_by(value)
    made = empty(value)
    assert made is not value
    assert type(made) is type(value)
    fill(made, held)
    assert made == value
    assert is_same(value, held, held_by(value))
    if isinstance(value, collections.deque):
        assert made.maxlen == value.maxlen


@given(value=values, other=values)
def test_what_another_object_held_is_replaced_as_a_whole(value, other):
    if type(value) is type(other) and not isinstance(value, collections.deque):
        fill(other, held_by(value))
        assert other == value


def test_slots_namespaces_and_values_that_are_kept_count_as_what_they_are():
    assert held_by(slotted(3)).attributes == {"a": 3}
    assert held_by(types.SimpleNamespace(x=1)).attributes == {"x": 1}
    config = Config(2, ["a"])
    before = held_by(config)
    assert config.total == 2
    # What follows from the others is no change.
    assert is_same(config, before, held_by(config))
    config.width = 3
    assert not is_same(config, before, held_by(config))


def test_no_method_of_the_user_s_runs():
    value = Counting(a=1)
    made = empty(value)
    fill(made, held_by(value))
    assert type(made) is Counting
    assert made == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (list, True),
        (Config, True),
        (Slotted, True),
        (int, False),
        (tuple, False),
        (type(jnp.ones(1)), False),
        (np.ndarray, False),
        (nnx.Param, False),
        (types.FunctionType, False),
        (types.ModuleType, False),
    ],
)
def test_only_objects_whose_contents_python_tells_can_be_written_into(kind, expected):
    assert is_writable(kind) is expected
    assert not is_fixed(kind) or kind is tuple
