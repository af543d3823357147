"""Saving and restoring decide together in a program of several processes; this plays one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from bridge import checkpoint
from bridge.checkpoint import CheckpointError
from tests.checkpoint.migrating_models import linen_variables, mixed_model
from tests.models import snapshot


@pytest.fixture
def two_processes(monkeypatch):
    """This is process 0 of two; what the other one reports is put into the list."""
    reports = []

    def gathered(own):
        return np.asarray([np.asarray(own), *reports])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    return reports


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "checkpoint"
    checkpoint.save(path, linen_variables())
    return path


def test_an_array_that_every_process_has_for_itself_is_stored_once(two_processes):
    """Orbax refuses such arrays of JAX, and writes NumPy arrays from the first process."""
    keys = jax.random.key(0)
    args = checkpoint.save_args({"params": {"w": jnp.ones(2)}, "RngKey": {"key": keys}})
    arrays = args["variables"].item
    assert type(arrays["params"]["w"]) is np.ndarray
    np.testing.assert_array_equal(arrays["RngKey"]["key"], np.asarray(jax.random.key_data(keys)))
    assert type(arrays["RngKey"]["key"]) is np.ndarray


def test_a_model_is_not_changed_here_if_another_process_could_not_restore(path, two_processes):
    model = mixed_model()
    before = snapshot(model)
    two_processes.append(True)
    with pytest.raises(CheckpointError, match=r"\[1\]"):
        checkpoint.restore(path, model)
    assert snapshot(model) == before
    two_processes[:] = [False]
    checkpoint.restore(path, model)
    assert snapshot(model) != before


def test_the_own_error_is_the_one_that_is_raised(path, two_processes):
    two_processes.append(True)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path, {"params": {"w": jnp.ones(2)}})
    assert caught.value.missing == (("params/w", "float32[2]"),)
