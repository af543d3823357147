"""The benchmark measures its subjects in turn, and keeps and shows what it found."""

import dataclasses
import json
import re
import time

import pytest

from benchmarks import curves, report, results
from benchmarks.__main__ import main
from benchmarks.measure import Effort, Spread, ratio, seconds
from benchmarks.row import Ratio, Row
from benchmarks.rows import ROWS

# Rows that take little: one is timed, the other counted.
SOME = "conversion of a variables tree", "jaxpr equations"
PNG = b"\x89PNG\r\n\x1a\n"


def counted(name="things", sizes=(1, 10)):
    return Row(
        name,
        "equations",
        sizes,
        {"one": lambda size: size, "two": lambda size: 2 * size + 1},
        (Ratio("two", "one", 2.5, since=10), Ratio("one", "two")),
        case=lambda size: size,
    )


def measured(*rows):
    return list(results.run(rows, Effort(rounds=3, turn=0.0), lambda row: row.sizes))


def test_subjects_take_turns_and_each_round_begins_with_another():
    order = []
    subjects = {name: lambda name=name: order.append(name) for name in "abc"}
    found = seconds(subjects, Effort(rounds=3, turn=0.0))
    assert "".join(order[-9:]) == "abc" + "bca" + "cab"
    assert [len(rounds) for rounds in found.values()] == [3, 3, 3]


def test_short_calls_are_repeated_and_the_time_is_that_of_one():
    calls = []

    def subject():
        calls.append(1)
        time.sleep(0.002)

    found = seconds({"a": subject}, Effort(rounds=2, turn=0.02))
    assert len(calls) > 3 + 2 * 2
    assert all(0.002 <= second < 0.02 for second in found["a"])


def test_where_calls_take_long_there_are_fewer_rounds():
    effort = Effort(rounds=400, turn=0.005, seconds=4.0)
    # Short turns, turns of 0.1 s on average, and turns so long that the fewest rounds are left.
    assert effort.rounds_of([0.005, 0.005]) == 400
    assert effort.rounds_of([0.05, 0.15]) == 40
    assert effort.rounds_of([3.0, 1.0]) == 10
    # What a row asks for is what it gets, whatever the time.
    assert effort.with_rounds(3).rounds_of([3.0, 1.0]) == 3
    assert effort.with_rounds(None) == effort


class Slow:
    """A result that has to be waited for."""

    def block_until_ready(self):
        time.sleep(0.01)
        return self


def test_dispatch_is_the_time_until_a_call_returns():
    effort = Effort(rounds=2, turn=0.005)
    (call,) = seconds({"a": Slow}, effort).values()
    (dispatch,) = seconds({"a": Slow}, effort, is_dispatch=True).values()
    assert all(second >= 0.01 for second in call)
    assert all(second < 0.005 for second in dispatch)


def test_rounds_are_spread_over_processes_and_counts_are_taken_once():
    timed, alone = (next(row for row in ROWS if row.name == name) for name in SOME)
    effort = Effort(rounds=5, turn=0.0, processes=2, seconds=8.0)
    assert effort.of_one_process == Effort(rounds=3, turn=0.0, seconds=4.0)
    found = list(results.run([timed, alone], effort, lambda row: row.sizes[:1]))
    # Both rows in the first process, the timed one again in the second.
    assert [one.row for one in found] == [*SOME, SOME[0]]
    first, last = found[0].subjects["State"], found[-1].subjects["State"]
    assert last.least <= first.least
    assert last != first


def test_a_ratio_is_taken_round_by_round():
    found = ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0])
    assert found == Spread(median=3.0, low=2.5, high=3.5, least=2.0)


def test_a_count_has_a_ratio_without_spread():
    found = measured(counted())
    assert [one.size for one in found] == [1, 10]
    assert found[1].subjects["two"] == Spread(21, 21, 21, 21)
    assert found[1].ratios[0].found == Spread(2.1, 2.1, 2.1, 2.1)


def test_a_target_holds_from_its_size_on():
    small, large = measured(counted())
    assert [ratio.is_met for ratio in small.ratios] == [None, None]
    assert [ratio.is_met for ratio in large.ratios] == [True, None]
    stacks = Ratio("two", "one", 2.5, is_for_stacks=True)
    assert (stacks.target(1), stacks.target("ViT-S/16")) == (2.5, None)
    missed = Row("x", "bytes", (1,), counted().subjects, (Ratio("two", "one", 2.0),), case=int)
    assert [(one.row, found.of) for one, found in report.missed(measured(missed))] == [("x", "two")]


def test_json_gives_back_what_was_measured():
    environment = results.environment(Effort(rounds=3, turn=0.0))
    found = measured(counted())
    text = results.to_json(environment, found)
    assert results.from_json(text) == (environment, tuple(found))


def test_the_environment_names_versions_and_cores_and_no_machine():
    environment = results.environment(Effort(rounds=3, turn=0.0))
    assert set(environment["versions"]) == {"jax", "jaxlib", "flax", "numpy"}
    assert set(environment) == {
        *("versions", "python", "platform", "processor", "cores", "device"),
        *("rounds", "turn", "processes"),
    }


def test_a_subject_may_be_left_out_where_it_takes_too_long():
    row = dataclasses.replace(counted(), largest={"two": 1})
    small, large = measured(row)
    assert (set(small.subjects), set(large.subjects)) == ({"one", "two"}, {"one"})
    assert (len(small.ratios), len(large.ratios)) == (2, 0)
    assert report.summary([small, large]).splitlines()[2:] == [
        "| things | two / one | 3.00 (1) |  |",
        "| things | one / two | 0.33 (1) |  |",
    ]


def test_growth_is_the_exponent():
    row = Row("x", "bytes", (1, 10, 100), {"s": lambda size: 3 * size**2}, (), case=int)
    assert results.growth(measured(row), "x", "s") == pytest.approx(2.0)
    assert results.growth(measured(counted(sizes=(1,))), "things", "one") is None


def test_the_table_for_a_document_has_every_size():
    assert report.summary(measured(counted())) == (
        "| measured | ratio | median by size | target |\n"
        "| --- | --- | --- | --- |\n"
        "| things | two / one | 3.00 (1), 2.10 (10) | 2.50 from 10 |\n"
        "| things | one / two | 0.33 (1), 0.48 (10) |  |"
    )


def test_the_picture_is_a_png(tmp_path):
    curves.draw(measured(counted(), counted("others")), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(PNG)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    assert main(["--quick", "--row", "jaxpr equations", "--output", str(tmp_path)]) == 0
    printed, told = capsys.readouterr()
    assert re.search(r"^took \d+ s: jaxpr equations$", told, re.MULTILINE)
    rows = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert [(row["row"], row["size"]) for row in rows] == [
        ("jaxpr equations", 1),
        ("jaxpr equations", 8),
    ]
    equations = rows[1]["subjects"]
    assert equations["ToLinen"] == equations["NNX"]
    assert re.search(rf"ToLinen \({equations['ToLinen']['median']:.0f}\)", printed)
    assert (tmp_path / "cost.png").read_bytes().startswith(PNG)


def test_every_ratio_is_between_subjects_of_its_row():
    for row in ROWS:
        assert {name for ratio in row.ratios for name in (ratio.of, ratio.to)} <= set(row.subjects)
    assert len({row.name for row in ROWS}) == len(ROWS)
