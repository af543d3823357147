"""The rules that say which Linen path is which NNX path."""

import pytest

from bridge._rules.rules import (
    UNCHANGED,
    Form,
    Rule,
    RulesError,
    Segment,
    read_backward,
)


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


@pytest.mark.parametrize("text", ["a", "*", "*@-1", r"a[\1]", "a[3@2]"])
def test_a_key_is_written_as_it_was_read(text):
    (segment,) = segments(text)
    assert segment.text == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (UNCHANGED, ""),
        (Form(fused="linen"), "split"),
        (Form((), True, "nnx"), "join and transpose and reshape"),
    ],
)
def test_a_report_says_what_a_rule_does_with_arrays(form, text):
    assert form.text == text


@pytest.mark.parametrize(
    ("rule", "linen", "nnx"),
    [
        ((r"a_(\d+)/b\.c", r"x.\1.y"), "a_12/b.c", "x/12/y"),
        ((r"(\w+)/k(\d)", r"\2.\1s"), "dense/k3", "3/denses"),
    ],
)
def test_a_path_is_found_again_by_the_rule_read_backwards(rule, linen, nnx):
    (route,), (back,) = Rule(*rule).routes, read_backward(dict([rule]))
    there = route.renaming()
    hit, landed = there.pattern.fullmatch(linen), back.pattern.fullmatch(nnx)
    assert hit is not None
    assert landed is not None
    assert hit.expand(there.template) == nnx
    assert landed.expand(back.template) == linen
    assert not route.is_stacked


@pytest.mark.parametrize(
    "table",
    [
        *({key: "c"} for key in ("a.b", r"a\d", "a|b", "(?:a)", "a+")),
        {r"(a)(b)": r"c\1"},
    ],
)
def test_what_cannot_be_read_backwards_is_an_error_that_names_it(table):
    with pytest.raises(RulesError) as caught:
        read_backward(table)
    assert repr(next(iter(table))) in caught.value.found
