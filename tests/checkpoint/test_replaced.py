"""A checkpoint that another program replaces or removes while this one reads it."""

import shutil

import jax.numpy as jnp
import pytest

from bridge import CheckpointError, checkpoint
from bridge.checkpoint import _arrays, _notes


def save(path, number):
    variables = {"params": {"a": jnp.full(4, float(number)), "b": jnp.full(3, float(number))}}
    checkpoint.save(path, variables, extra={"moments": jnp.full(2, number)}, overwrite=True)


def after_each(monkeypatch, module, name, actions):
    """Does the next action after each call of a function."""
    original = getattr(module, name)

    def replacement(*args, **kwargs):
        found = original(*args, **kwargs)
        action = next(actions, None)
        if action:
            action()
        return found

    monkeypatch.setattr(module, name, replacement)


READS = [(_notes, "read"), (_arrays, "read")]


@pytest.mark.parametrize(("module", "name"), READS)
@pytest.mark.parametrize("verify", [False, True])
def test_restore_never_mixes_a_checkpoint_with_the_next(
    tmp_path, monkeypatch, module, name, verify
):
    save(tmp_path / "best", 1)
    replace = (lambda number=number: save(tmp_path / "best", number) for number in (2, 3))
    after_each(monkeypatch, module, name, replace)
    model, extra = checkpoint.restore(
        tmp_path / "best", extra={"moments": jnp.zeros(2, int)}, verify=verify
    )
    found = {float(x[0]) for x in (*model["params"].values(), extra["moments"])}
    assert found == {3.0}


def test_restore_gives_up_when_no_read_is_undisturbed(tmp_path, monkeypatch):
    save(tmp_path / "best", 1)
    replace = (lambda number=number: save(tmp_path / "best", number) for number in range(100))
    after_each(monkeypatch, _notes, "read", replace)
    with pytest.raises(CheckpointError, match="replaced or removed, while it was read"):
        checkpoint.restore(tmp_path / "best")


def test_restore_says_that_a_checkpoint_was_taken_away(tmp_path, monkeypatch):
    save(tmp_path / "best", 1)
    after_each(monkeypatch, _notes, "read", iter([lambda: shutil.rmtree(tmp_path / "best")]))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.restore(tmp_path / "best")


def test_verify_finds_no_damage_in_a_checkpoint_that_is_replaced(tmp_path, monkeypatch):
    save(tmp_path / "best", 1)
    after_each(monkeypatch, _notes, "read", iter([lambda: save(tmp_path / "best", 2)]))
    assert checkpoint.verify(tmp_path / "best") == 3
