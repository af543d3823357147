"""`python -m bridge demo`, run as a user runs it."""

import dataclasses
import itertools
import json
import sys
import textwrap

import numpy as np
import pytest

from bridge import __main__
from bridge._cli import _output
from bridge._demo import _migration, _report, _weights
from tests import processes

# Short training; the floor goes with it, the comparisons do not depend on it.
SHORT = ["--epochs", "3", "--steps", "2", "--floor", "0.5"]

PERTURBED_STEP = """
    import dataclasses, sys
    from bridge import __main__, _demo
    _demo._emulate_devices()
    from bridge._demo import _steps

    linen, wrapped, *_ = _steps.STEPS

    def build(weights, seed, mesh):
        wrong = dict(weights)
        wrong['params/Dense_0/bias'] = wrong['params/Dense_0/bias'] + 1e-3
        return wrapped.build(wrong, seed, mesh)

    _steps.STEPS = (linen, dataclasses.replace(wrapped, build=build))
    sys.exit(__main__.main(['demo', '--json', '--epochs', '1', '--steps', '1', '--floor', '0']))
"""


@pytest.fixture(scope="module")
def demo():
    return processes.run_module("bridge", "demo", "--json", *SHORT, timeout=300)


@pytest.fixture(scope="module")
def report(demo):
    return json.loads(demo.stdout)


def test_exits_with_zero_when_every_check_holds(demo, report):
    assert report["held"], demo.stdout
    assert demo.returncode == 0, demo.stderr


def test_takes_the_five_steps_in_order_on_eight_devices(report):
    names = [step["name"] for step in report["steps"]]
    assert names == ["linen", "wrapped", "mixed", "nnx-over-linen", "nnx"]
    assert [step["index"] for step in report["steps"]] == [0, 1, 2, 3, 4]
    assert report["devices"] == 8


def test_every_step_computes_what_the_step_before_computed(report):
    first, *later = report["steps"]
    assert first["max_abs_diff"] is None
    assert all(step["max_abs_diff"] <= report["tolerance"] for step in later)
    assert len({step["parameters"] for step in report["steps"]}) == 1


def test_every_step_trains_all_its_weights_and_statistics(report):
    assert [step["untrained"] for step in report["steps"]] == [[]] * 5


def test_accuracy_is_measured_before_and_after_training(report):
    steps = report["steps"]
    assert steps[0]["accuracy_before"] < 0.3 < steps[0]["accuracy_after"]
    for before, after in itertools.pairwise(steps):
        assert after["accuracy_before"] == before["accuracy_after"]


def test_progress_goes_to_stderr_without_warnings(demo):
    assert "step 4 nnx" in demo.stderr
    assert "ConvBlock_2 -> ConvBlock_1" in demo.stderr
    assert "warning" not in demo.stderr.lower()


def test_a_wrong_weight_makes_the_demo_fail():
    outcome = processes.run_code(textwrap.dedent(PERTURBED_STEP), timeout=300)
    assert outcome.returncode == 1, outcome.stderr
    report = json.loads(outcome.stdout)
    assert [step["held"] for step in report["steps"]] == [True, False]
    assert not report["held"]
    assert report["steps"][1]["max_abs_diff"] == pytest.approx(1e-3, rel=0.01)
    assert "differ" in report["steps"][1]["problems"][0]


def test_a_missing_extra_exits_with_three_and_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert __main__.main(["demo"]) == 3
    shown = capsys.readouterr()
    assert "scikit-learn" in shown.err
    assert "pip install 'linen-nnx-bridge[demo]'" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dmeo"],
        ["demo", "--epochs", "0"],
        ["demo", "--steps", "many"],
        ["demo", "--seed", "-1"],
        ["demo", "--floor", "95"],
    ],
)
def test_wrong_usage_exits_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m bridge" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_shows_an_example_and_the_exit_codes(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(arguments)
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert "exit codes:" in shown
    assert "  python -m bridge demo\n" in shown


def one_step(**changes):
    result = _migration.StepResult(
        index=1,
        name="wrapped",
        change="all in ToNNX",
        renames={},
        parameters=14458,
        max_abs_diff=1e-6,
        untrained=[],
        accuracy_before=0.97,
        accuracy_after=0.98,
        seconds=1.0,
        problems=[],
    )
    return dataclasses.replace(result, **changes)


def report_of(step):
    return _migration.MigrationReport(
        devices=8,
        train_images=1437,
        held_out_images=360,
        seed=0,
        epochs=1,
        training_steps=1,
        tolerance=1e-5,
        floor=0.95,
        steps=[step],
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_abs_diff": 2e-5}, "differ"),
        ({"max_abs_diff": float("nan")}, "differ"),
        ({"untrained": ["batch_stats/norm/mean"]}, "batch_stats/norm/mean"),
        ({"accuracy_before": 0.9}, "below the floor"),
        ({"accuracy_after": 0.9}, "below the floor"),
    ],
)
def test_each_check_is_reported_when_it_fails(changes, problem):
    assert _migration.problems_of(one_step(), floor=0.95) == []
    (found,) = _migration.problems_of(one_step(**changes), floor=0.95)
    assert problem in found


def test_an_untrained_first_model_may_be_below_the_floor():
    first = one_step(index=0, max_abs_diff=None, accuracy_before=0.1)
    assert _migration.problems_of(first, floor=0.95) == []


def test_a_difference_that_is_no_number_still_gives_valid_json():
    result = _report.result_of(report_of(one_step(max_abs_diff=float("nan"))))
    document = json.loads(json.dumps(result.document, allow_nan=False))
    assert document["steps"][0]["max_abs_diff"] is None


def test_the_table_shows_the_step_its_difference_and_what_failed(capsys):
    result = _report.result_of(report_of(one_step(problems=["outputs differ"])))
    _output.write(result, as_json=False)
    shown = capsys.readouterr().out
    for expected in ("1 wrapped  all in ToNNX", "14,458", "1.0e-06", "FAILED", "outputs differ"):
        assert expected in shown
    assert "Not every check held" in shown


def test_renames_match_whole_components_longest_first_and_do_not_chain():
    weights = {
        "params/Block_1/Conv_0/kernel": 1,
        "params/Block_1/scale": 2,
        "batch_stats/Block_1/mean": 3,
        "params/Block_10/scale": 4,
        "params/Block_2/scale": 5,
    }
    rules = {"Block_1": "first", "Block_1/Conv_0": "first/conv", "Block_2": "Block_1"}
    assert _weights.renamed(weights, rules) == {
        "params/first/conv/kernel": 1,
        "params/first/scale": 2,
        "batch_stats/first/mean": 3,
        "params/Block_10/scale": 4,
        "params/Block_1/scale": 5,
    }


def test_weights_that_do_not_fit_are_all_listed():
    template = {"params": {"a": np.zeros(2), "b": np.zeros(2)}, "batch_stats": {}}
    with pytest.raises(ValueError, match="missing params/a; unknown params/c; params/b is"):
        _weights.into_linen(template, {"params/b": np.zeros(3), "params/c": np.zeros(2)})
