"""Reads of a checkpoint that end after another one has failed: nothing of them reaches stderr."""

import asyncio
import logging
import subprocess
import sys

import pytest

from bridge.checkpoint import _failures


@pytest.fixture
def silenced(monkeypatch):
    """Undone after the test: the filter is meant for the rest of a process."""
    logger = logging.getLogger("asyncio")
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    _failures.silence_late_reads()


def _drop(error):
    """Leaves an error in a future that nobody asks for, as a loop does that is left early."""
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    future.set_exception(error)
    del future
    loop.close()


@pytest.mark.usefixtures("silenced")
@pytest.mark.parametrize(
    "text",
    [
        'OUT_OF_RANGE: Error reading "params.fc.kernel/0.0" in OCDBT database',
        "NOT_FOUND: Error opening the file",
        "DATA_LOSS: Checksum mismatch",
    ],
)
def test_a_failed_read_that_nobody_waits_for_is_not_logged(caplog, text):
    _drop(ValueError(text))
    assert not caplog.records


@pytest.mark.usefixtures("silenced")
@pytest.mark.parametrize(
    "error",
    [ValueError("Data loss"), RuntimeError("OUT_OF_RANGE: a reader"), KeyError("loop")],
    ids=repr,
)
def test_an_error_of_the_users_own_tasks_is_logged(caplog, error):
    _drop(error)
    (record,) = caplog.records
    assert record.exc_info[1] is error


DAMAGED = """
import pathlib, sys
import jax.numpy as jnp
from bridge import checkpoint

path = pathlib.Path(sys.argv[1]) / "model"
checkpoint.save(path, {"params": {f"w{i}": jnp.ones(3) for i in range(30)}})
(path / "variables" / "manifest.ocdbt").write_bytes(b"")
for target in (None, {"params": {f"w{i}": jnp.ones(3) for i in range(30)}}):
    try:
        checkpoint.restore(path, target)
    except checkpoint.CheckpointError as error:
        print(len(error.unreadable))
"""


def test_a_reader_of_a_damaged_checkpoint_sees_one_error_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stdout.split() == ["30", "30"]
    assert done.stderr == ""
