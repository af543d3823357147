import pytest

from bridge._rules.numbers import families, folded, folded_rows, sequence


@pytest.mark.parametrize(
    ("texts", "few"),
    [
        (["b_0/w", "b_1/w", "b_2/w"], ["b_{0..2}/w"]),
        (["b_0/w", "b_2/w"], ["b_{0,2}/w"]),
        (["b_0/c_0", "b_0/c_1", "b_1/c_0", "b_1/c_1"], ["b_{0,1}/c_{0,1}"]),
        # Not every combination is there.
        (["b_0/c_0", "b_1/c_1"], ["b_0/c_0", "b_1/c_1"]),
        (["a", "b_0"], ["a", "b_0"]),
    ],
)
def test_texts_that_differ_in_their_numbers_alone_are_one(texts, few):
    assert folded(texts) == few


def test_rows_are_one_if_each_column_is_and_there_are_four():
    rows = [(f"b_{n}", f"b.{n}") for n in range(4)]
    assert folded_rows(rows) == [("b_{0..3}", "b.{0..3}")]
    assert folded_rows(rows[:3]) == rows[:3]
    crossed = [(f"b_{n}/{n}", "x") for n in range(4)]
    assert folded_rows(crossed) == crossed


def test_numbers_that_run_along_are_a_sequence():
    assert sequence(["up_2", "up_0", "up_1"]) == [2, 0, 1]
    assert sequence(["up_0", "down_1"]) is None
    assert sequence(["b_0/c_0", "b_1/c_1"]) is None
    assert list(families(["a_10", "b", "a_9"]).values()) == [["a_9", "a_10"], ["b"]]
