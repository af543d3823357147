"""The NNX paths of rules."""

import pytest

from bridge._conversion.rule_paths import Segment, segments


def test_each_key_says_whether_and_on_which_axis_it_is_stacked():
    assert segments("encoder.blocks.*@-1.fc") == [
        Segment("encoder", None, 0),
        Segment("blocks", None, 0),
        Segment(None, None, -1),
        Segment("fc", None, 0),
    ]
    assert segments(r"blocks[\1@2].0") == [Segment("blocks", r"\1", 2), Segment("0", None, 0)]
    assert [part.is_stacked for part in segments("a.*.b[3]") or ()] == [False, True, True]


def test_the_empty_path_is_the_model_itself():
    assert segments("") == []


@pytest.mark.parametrize("text", ["a..b", "a.", "a[", "a[b]", "a[1@]", "*x", "a*"])
def test_what_is_no_path_is_told_from_the_empty_one(text):
    assert segments(text) is None
