"""The rules that say which Linen path is which NNX path."""

import pytest

from bridge._conversion.rules import Rule, Segment


def test_each_key_says_whether_and_on_which_axis_it_is_stacked():
    assert Rule("a", "encoder.blocks.*@-1.fc").segments == (
        Segment("encoder"),
        Segment("blocks"),
        Segment(None, None, -1),
        Segment("fc"),
    )
    rule = Rule(r"a_(\d)", r"blocks[\1@2].0")
    assert rule.segments == (Segment("blocks", r"\1", 2), Segment("0"))
    assert rule.is_stacked
    assert not Rule("a", "b.0").is_stacked


def test_the_empty_path_is_the_model_itself():
    assert Rule("a", "").segments == ()


@pytest.mark.parametrize(
    "text", ["a..b", "a.", "a[", "a[b]", "a[1@]", "*x", "a*", "*.*", "a[0].b[1]", r"\1", 1]
)
def test_what_cannot_be_read_is_no_rule(text):
    with pytest.raises(ValueError, match=r"(no|not|more) "):
        Rule("a", text)
