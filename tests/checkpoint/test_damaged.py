"""A checkpoint that is damaged or was never finished: what is lost is named, nothing is changed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError, CheckpointNotFoundError, _arrays
from tests.models import snapshot
from tests.strategies import exact

# Orbax reads arrays side by side in an event loop, which it closes when the first one fails. What
# tensorstore reports of the others then finds no loop, and nobody waits for it any more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

VARIABLES = {"params": {"a": jnp.ones((2, 3)), "b": (jnp.ones(4), 3)}}


def damaged(path, tmp_path, name, size=0.5):
    """A copy of a checkpoint one of whose files is cut off."""
    copy = tmp_path / "damaged"
    shutil.copytree(path, copy)
    file = copy / name
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * size)])
    return copy


def data_files(path):
    """The files that hold the arrays, the largest last."""
    files = [file for file in (path / "variables").rglob("d/*") if file.is_file()]
    return sorted(files, key=lambda file: file.stat().st_size)


@pytest.fixture(scope="module")
def large_path(tmp_path_factory):
    """A checkpoint whose arrays are too large to be in one file with the others'."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    checkpoint.save(path, {"params": {name: noise(i) for i, name in enumerate("abc")}})
    return path


def noise(seed):
    """Values that do not compress."""
    return np.asarray(jax.random.normal(jax.random.key(seed), (2000,)))


def test_a_truncated_array_is_named_and_the_model_stays_as_it_was(large_path, tmp_path):
    name = data_files(large_path)[-1].relative_to(large_path)
    path = damaged(large_path, tmp_path, name)
    state = nnx.State({name: nnx.Param(jnp.zeros(2000)) for name in "abc"})
    module = bridge.ToNNX.from_variables(nn.Dense(1), {"params": nnx.to_pure_dict(state)})
    before = snapshot(module)
    for target in (module, state, None):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(path, target)
        named = {where for where, _ in caught.value.unreadable}
        assert named < {"params/a", "params/b", "params/c"}
        assert len(named) >= 1
    assert snapshot(module) == before
    # What is whole can still be had.
    whole = ({"a", "b", "c"} - {where.removeprefix("params/") for where in named}).pop()
    target = {"params": {whole: jnp.zeros(2000)}}
    restored = checkpoint.restore(path, target, allow_unexpected=True)
    np.testing.assert_array_equal(restored["params"][whole], noise("abc".index(whole)))


@pytest.mark.parametrize(
    "name", ["bridge/metadata", "variables/manifest.ocdbt", "variables/_METADATA"]
)
def test_a_truncated_index_is_named(large_path, tmp_path, name):
    path = damaged(large_path, tmp_path, name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path)
    assert caught.value.unreadable


def test_a_file_that_is_gone_is_named(large_path, tmp_path):
    shutil.copytree(large_path, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "variables")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "copy")
    assert {where for where, _ in caught.value.unreadable} == {"params/a", "params/b", "params/c"}


def test_a_reason_for_all_arrays_stands_once(tmp_path):
    """Regression: each array had a line of its own, as its name was in the reason."""
    arrays = {f"Dense_{n}": {"kernel": np.ones(2), "bias": np.ones(2)} for n in range(15)}
    path = tmp_path / "model"
    checkpoint.save(path, {"params": arrays})
    (path / "variables" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path)
    assert len(caught.value.unreadable) == 30
    first, second, last = str(caught.value).splitlines()
    assert first == f"arrays cannot be read from {path / 'variables'}:"
    named = ", ".join(path for path, _ in caught.value.unreadable[:4])
    assert second.startswith(f"  - 30 leaves ({named} and 26 more): ")
    assert "NOT_FOUND" in second
    assert "Nothing was changed in memory" in last


def test_a_truncated_msgpack_file_is_named(tmp_path):
    content = serialization.to_bytes({"params": {"w": jnp.ones(100)}})
    (tmp_path / "file").write_bytes(content[:-50])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "file")
    assert caught.value.unreadable[0][0] == str(tmp_path / "file")


def test_a_checkpoint_of_a_later_format_says_so(large_path, tmp_path):
    shutil.copytree(large_path, tmp_path / "copy")
    notes = tmp_path / "copy" / "bridge" / "metadata"
    notes.write_text(notes.read_text().replace('"version": 1', '"version": 999'))
    with pytest.raises(CheckpointError, match="999"):
        checkpoint.restore(tmp_path / "copy")


def test_an_interrupted_save_does_not_hide_the_previous_checkpoint(tmp_path, monkeypatch):
    steps = tmp_path / "steps"
    checkpoint.save(steps / "1", VARIABLES)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    # All files are written by then, and the directory has not got its name.
    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", interrupt)
    for name in "12":
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(steps / name, {"params": {"w": jnp.ones(2)}}, overwrite=True)
    monkeypatch.undo()
    assert [child.name for child in steps.iterdir()] == ["1"]
    assert exact(checkpoint.restore(steps / "1")) == exact(VARIABLES)


def test_what_orbax_left_of_an_interrupted_save_is_no_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "model", VARIABLES)
    unfinished = tmp_path / "model.orbax-checkpoint-tmp"
    (tmp_path / "model").rename(unfinished)
    with pytest.raises(CheckpointNotFoundError, match=unfinished.name) as caught:
        checkpoint.restore(tmp_path / "model")
    assert "interrupted" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointError, match="unfinished"):
        checkpoint.restore(unfinished)
    # What is left does not disturb the next save.
    checkpoint.save(tmp_path / "model", VARIABLES)
    assert exact(checkpoint.restore(tmp_path / "model")) == exact(VARIABLES)


def test_one_failed_array_among_many_is_found_without_reading_each_alone(tmp_path, monkeypatch):
    values = {f"x{i}": np.full(2, i) for i in range(200)}
    checkpoint.save(tmp_path / "model", {"params": values})
    calls = []
    read = _arrays._read

    def failing(directory, tree, wanted):
        calls.append(len(wanted))
        if any(array_names[-1] == "x17" for array_names in wanted):
            raise ValueError("damaged")
        return read(directory, tree, wanted)

    monkeypatch.setattr(_arrays, "_read", failing)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "model")
    assert caught.value.unreadable == (("params/x17", "damaged"),)
    assert len(calls) < 40
