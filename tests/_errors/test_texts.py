"""Messages write paths, values and lists in one way."""

import numpy as np
import pytest

from bridge._errors.texts import (
    bullets,
    by_reason,
    did_you_mean,
    listed,
    misfits,
    path_text,
    shown,
    with_remedy,
)


def test_a_path_is_written_as_flax_writes_it():
    assert path_text("params", ("layers", 0, "kernel")) == "params/layers/0/kernel"
    assert path_text("params", ()) == "params"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3 of type int"),
        ("a", "'a' of type str"),
        (np.float32, "the class float32"),
        (None, "None of type NoneType"),
    ],
)
def test_a_value_is_shown_with_its_type(value, text):
    assert shown(value) == text


def test_a_long_value_is_cut_and_its_type_is_not():
    text = shown(list(range(1000)))
    assert text.endswith("… of type list")
    assert len(text) < 100


def test_a_value_is_shown_in_one_line():
    assert shown(np.ones((2, 2))) == "array([[1., 1.], [1., 1.]]) of type ndarray"


def test_a_reason_that_several_leaves_share_stands_once():
    problems = [("a", "broken"), ("b", "lost"), *((f"c{n}", "broken") for n in range(5))]
    assert by_reason(problems) == [
        ("6 leaves (a, c0, c1, c2 and 2 more)", "broken"),
        ("b", "lost"),
    ]
    assert by_reason(problems[:3]) == [("2 leaves (a, c0)", "broken"), ("b", "lost")]


def test_what_is_missing_comes_before_what_is_another():
    assert misfits([("a", "float32[3]")], [("b", "float32[3]", "float32[4]")]) == [
        "a: missing, expected float32[3]",
        "b: expected float32[3], found float32[4]",
    ]


def test_lists_are_readable_when_they_are_empty():
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed([]) == "none"
    assert bullets(["a", "b"]) == "\n  - a\n  - b"
    assert bullets([]) == ""


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("optstate", "Did you mean opt_state?"),
        ("model", ""),
        ("opt_state", "Did you mean opt_state?"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest_one(name, question):
    assert did_you_mean(name, ["opt_state", "step"]) == question


def test_what_to_do_stands_below_a_short_list_and_above_a_long_one():
    assert with_remedy("it fails", ["a", "b"], "Do it.") == "it fails:\n  - a\n  - b\nDo it."
    assert with_remedy("it fails", ["a"], "") == "it fails:\n  - a"
    assert with_remedy("it fails", ["a"] * 13, "Do it.").splitlines()[0] == (
        "it fails, 13 problems. Do it."
    )
