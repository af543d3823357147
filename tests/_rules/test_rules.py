"""The rules that say which Linen path is which NNX path."""

import pytest

from bridge._rules.rules import UNCHANGED, Form, Rule, Segment


def segments(nnx):
    (route,) = Rule(r"a_(\d)", nnx).routes
    return route.segments


def test_each_key_says_whether_and_on_which_axis_it_is_stacked():
    assert segments("encoder.blocks.*@-1.fc") == (
        Segment("encoder"),
        Segment("blocks"),
        Segment(None, None, -1),
        Segment("fc"),
    )
    assert segments(r"blocks[\1@2].0") == (Segment("blocks", r"\1", 2), Segment("0"))


def test_the_empty_path_is_the_model_itself():
    assert segments("") == ()


@pytest.mark.parametrize(
    "text", ["a..b", "a.", "a[", "a[b]", "a[1@]", "*x", "a*", "*.*", "a[0].b[1]", r"\1", 1]
)
def test_what_cannot_be_read_is_no_rule(text):
    with pytest.raises(ValueError, match=r"(no|not|more) "):
        Rule("a", text)


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        (("a", "b"), UNCHANGED),
        (("a", "b reshape"), Form(is_reshaped=True)),
        (("a", "b transpose"), Form(())),
        (("a", "b transpose(0, 2, -1) reshape"), Form((0, 2, -1), True)),
        (("a/qkv", "a.{q,k,v}"), Form(fused="linen")),
        (("a/{q,k,v@-3}", "a.qkv reshape"), Form(None, True, "nnx", -3)),
        (("a/qkv", "a.{12x q,k,v}"), Form(fused="linen", times=12)),
        (("a/{2x q,k,v@0}", "a.qkv transpose"), Form((), False, "nnx", 0, 2)),
        # Quantifiers of regular expressions.
        (("a{2}b{2,3}", "b"), UNCHANGED),
    ],
)
def test_words_and_braces_say_how_arrays_differ(rule, form):
    assert Rule(*rule).form == form


def test_each_part_has_its_paths():
    fused = Rule(r"h/(\d+)/c_attn", r"h.\1.{q, k,v@0}_proj transpose")
    assert [(r.linen, r.nnx) for r in fused.routes] == [
        (r"h/(\d+)/c_attn", rf"h.\1.{name}_proj") for name in "qkv"
    ]
    joined = Rule("{Dense_0,Dense_2}/kernel", "kernel")
    assert [r.linen for r in joined.routes] == ["Dense_0/kernel", "Dense_2/kernel"]


@pytest.mark.parametrize("rule", [("{a,b}", "{c,d}"), ("a", "{b,c}.{d,e}"), ("{a,b}{c,d}", "e")])
def test_parts_are_named_once(rule):
    with pytest.raises(ValueError, match="braces"):
        Rule(*rule)
