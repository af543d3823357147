"""A killed run goes on bit for bit: the short form of `python -m benchmarks.long_run`."""

import json

import numpy as np
import pytest

from benchmarks import long_run
from benchmarks.long_run import State


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    long_run.train(folder, steps=40, every=5)
    return folder


def test_a_run_that_is_killed_in_a_save_has_the_losses_of_an_unbroken_one(alone, tmp_path):
    [first] = long_run.train_and_kill(tmp_path, steps=40, every=5, kills=1, first=1)
    assert first.startswith("in a save")
    assert len(long_run.losses_of(alone)) == 40
    assert len(np.unique(long_run.losses_of(alone))) == 40
    assert long_run.problems(alone, tmp_path) == []


def test_another_loss_and_a_missing_one_are_found(alone, tmp_path):
    for name in ("losses", "states"):
        (tmp_path / name).write_bytes((alone / name).read_bytes())
    losses = long_run.losses_of(alone).copy()
    losses[7] = np.nextafter(losses[7], 0)
    (tmp_path / "losses").write_bytes(losses.tobytes())
    assert long_run.problems(alone, tmp_path) == ["other losses at 1 steps, the first is 7"]
    (tmp_path / "losses").write_bytes(losses[:-1].tobytes())
    assert long_run.problems(alone, tmp_path) == ["39 losses, 40 expected"]


def test_growth_of_a_process_is_found(alone, tmp_path):
    (tmp_path / "losses").write_bytes((alone / "losses").read_bytes())
    with open(tmp_path / "states", "w") as file:
        for step in range(1, 5):
            file.write(json.dumps(State(1, step, 30 + step, 5, 400.0)) + "\n")
    assert long_run.problems(alone, tmp_path) == [
        "arrays grew from 32 to 33 at step 3",
        "arrays grew from 32 to 34 at step 4",
    ]
