"""Texts about large models stay short."""

import re

import pytest

from bridge.parity._long_text import MOST_CHARACTERS, folded, limited


@pytest.mark.parametrize("block", ["blocks.{}", "blocks_{}", "blocks/{}", "params/h/{}", "a[{}]"])
def test_blocks_that_are_alike_are_one_line(block):
    entries = [(block.format(i) + f"/{leaf}", "bitwise") for i in range(12) for leaf in "abc"]

    [run] = folded(entries)

    assert str(run) == f"{block.format(0)} ... {block.format(11)}: 3 leaves each, bitwise"


def test_a_block_that_is_not_alike_stands_alone():
    entries = [
        (f"h_{i}/{leaf}", "close" if i == 3 else "bitwise") for i in range(6) for leaf in "ab"
    ]

    assert [str(run) for run in folded([("head/kernel", "close"), *entries])] == [
        "the others: 1 leaf, close",
        "h_0 ... h_2: 2 leaves each, bitwise",
        "h_3: 2 leaves, close",
        "h_4 ... h_5: 2 leaves each, bitwise",
    ]


def test_a_name_with_a_digit_is_no_block():
    assert [run.first for run in folded([("conv2d/kernel", "bitwise"), ("ln1/scale", "x")])] == [""]


@pytest.mark.parametrize("text", ["line\n" * 5000, "x" * 100_000, "y" * 3000 + "\nz" * 400])
def test_a_long_text_is_cut_and_says_where_the_rest_is(text):
    short = limited(text, "elsewhere")

    assert re.search(r"\n\.\.\. (\d+ more lines|cut); elsewhere$", short)
    assert len(short.splitlines()) < 200
    assert len(short) < MOST_CHARACTERS + 400


def test_a_short_text_is_left_alone():
    assert limited("a\nb\n", "elsewhere") == "a\nb\n"
