"""What classes and their instances hold."""

import collections
import functools
import io
import re

import pytest
from flax import nnx

from bridge._equality.classes import InstanceParts, class_parts, instance_parts


class Plain:
    def __init__(self):
        self.a = 1


class Slotted:
    __slots__ = ("a", "b")


class SlottedAndMore(Slotted):
    def __init__(self):
        self.a, self.c = 1, 2


class Named(dict):
    """A dict whose own way to list itself says something else."""

    def __iter__(self):
        return iter(())

    def items(self):
        return ()


class Point(tuple):
    __slots__ = ()


class Text(str):
    __slots__ = ("note",)


class Parent:
    rate = 1

    def run(self):
        return self.rate


class Child(Parent):
    rate = 2


class Model(nnx.Module):
    width = 3

    def __init__(self):
        self.prepare()

    def prepare(self):
        return self.helper

    @property
    def helper(self):
        return 1

    def __call__(self):
        return self.later()

    def later(self):
        return 2

    @functools.cached_property
    def unused(self):
        return 3


def names(cls, **options):
    return [name for name, _ in class_parts(cls, **{"calls": True, **options})]


def test_a_class_holds_its_own_attributes_then_its_parents():
    assert class_parts(Child, calls=True) == [
        ("", type),
        ("rate", 2),
        ("rate", 1),
        ("run", Parent.run),
    ]


def test_what_python_derives_from_a_class_is_not_told_again():
    assert not {"__doc__", "__module__", "__qualname__", "__dict__"} & set(names(Plain))


def test_of_an_nnx_module_the_methods_that_construct_it_count():
    constructing = set(names(Model, calls=False))
    assert {"width", "__init__", "prepare", "helper"} <= constructing
    assert not {"__call__", "later", "unused"} & constructing
    assert {"__call__", "later", "unused"} <= set(names(Model))


def test_an_object_holds_its_attributes():
    assert instance_parts(Plain()) == InstanceParts(None, {"a": 1})


def test_a_slot_that_is_not_set_is_told_from_one_that_holds_none():
    value = Slotted()
    assert instance_parts(value) == InstanceParts(None, {})
    value.a = None
    assert instance_parts(value) == InstanceParts(None, {"a": None})


def test_slots_and_a_dict_are_looked_at_together():
    assert instance_parts(SlottedAndMore()) == InstanceParts(None, {"a": 1, "c": 2})


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Named(a=1), {"a": 1}),
        (Point((1, 2)), (1, 2)),
        (collections.namedtuple("Pair", "a b")(1, 2), (1, 2)),
    ],
)
def test_an_instance_of_a_built_in_type_holds_what_that_says(value, base):
    assert instance_parts(value) == InstanceParts(base, {})


def test_an_ordered_dict_holds_its_items_in_their_order():
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    made = instance_parts(collections.OrderedDict(one))
    assert made == instance_parts(collections.OrderedDict(one))
    assert repr(made) != repr(instance_parts(collections.OrderedDict(other)))


def test_a_text_with_a_slot_holds_both():
    text = Text("abc")
    text.note = "x"
    assert instance_parts(text) == InstanceParts("abc", {"note": "x"})


@pytest.mark.parametrize("value", [io.StringIO("x"), iter("ab"), (i for i in "ab")])
def test_what_python_cannot_look_into_is_nothing_or_what_pickle_would_write(value):
    parts = instance_parts(value)
    assert parts is None or isinstance(parts.base, tuple)


def test_a_pattern_is_what_makes_it_again():
    made = instance_parts(re.compile("a+")).base
    assert made == instance_parts(re.compile("a+")).base
    assert made != instance_parts(re.compile("a*")).base
