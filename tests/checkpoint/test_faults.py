"""Whatever goes wrong in a save: the old or the new checkpoint is there, and nothing else."""

import concurrent.futures
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError, CheckpointNotFoundError, _files, _publish
from tests import processes
from tests.checkpoint import faulty_steps
from tests.strategies import exact

ROOT = Path(__file__).parents[2]
VALUES = {name: {"params": {"w": np.full((3,), i)}} for i, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two checkpoints of few files: every file is some steps."""
    folder = tmp_path_factory.mktemp("made")
    for index, name in enumerate(VALUES):
        checkpoint.save(folder / name, {"counter": {"step": index}})
    return folder


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def attempts(made, folder, fault, *, is_there):
    """The outcome of each try to put the new checkpoint in the place of the old one."""
    arguments = (folder, made / "old", made / "new", fault, is_there)
    done = processes.run(faulty_steps.main, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def found_at(made, path):
    """Which checkpoint is at a path, whole."""
    if not path.exists():
        return None
    found = contents(path)
    return next((name for name in VALUES if found == contents(made / name)), "neither")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(made, tmp_path, is_there):
    tries = attempts(made, tmp_path, "kill", is_there=is_there)
    assert len(tries) > 12
    seen = []
    for entry in tries:
        assert entry["outcome"] is None
        place = Path(entry["place"])
        found = found_at(made, place / "model")
        # Nothing but hidden directories is left.
        assert {child.name for child in place.iterdir() if child.name[0] != "."} <= {"model"}
        if found is None and is_there:
            # Between the two renames it is read where it is.
            assert checkpoint.restore(place / "model") == {"counter": {"step": 0}}
            assert checkpoint.layout(place / "model").leaves[0].path == ("step",)
            found = "aside"
        seen.append(found)
        # The next save removes all else, and puts the old one back.
        if found == "aside":
            with pytest.raises(CheckpointError, match="something already"):
                checkpoint.save(place / "model", {"counter": {"step": 2}})
            assert found_at(made, place / "model") == "old"
        with _publish.publishing(place / "model", overwrite=True) as target:
            faulty_steps.copy(made / "old", Path(os.fspath(target)))
        assert found_at(made, place / "model") == "old"
        assert [child.name for child in place.iterdir()] == ["model"]
    order = ["old", "aside", "new"] if is_there else [None, "new"]
    assert set(seen) == set(order)
    assert seen == sorted(seen, key=order.index)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_failure_of_any_step_is_one_error_and_leaves_nothing_behind(made, tmp_path, is_there):
    tries = attempts(made, tmp_path, "fail", is_there=is_there)
    assert len(tries) > 12
    failed = set()
    for entry in tries:
        place, outcome = Path(entry["place"]), entry["outcome"]
        found = found_at(made, place / "model")
        assert [child.name for child in place.iterdir()] == ["model"] * (found is not None)
        if outcome["error"] is None:
            # Deleting the old one is tried again.
            assert found == "new"
        else:
            kind, text = outcome["error"]
            assert kind == "BridgeError"
            assert "Input/output error" in text
            assert str(place / "model") in text
            assert len(text.splitlines()) <= 3
            assert found == ("old" if is_there else None)
            failed.update(outcome["steps"])
    assert {"fsync", "os.mkdir", "open", "os.rename"} <= failed


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "model"
    checkpoint.save(path, VALUES["old"])
    left, other = _files.place_of(path), tmp_path / "model.next"
    for place in (left, other):
        (place / "new.orbax-checkpoint-tmp").mkdir(parents=True)
    checkpoint.save(left / "old", VALUES["old"])
    # What is left of an old one of which a part is deleted.
    (left / "replaced" / "variables").mkdir(parents=True)
    checkpoint.save(path, VALUES["new"], overwrite=True)
    assert set(tmp_path.iterdir()) == {path, other}
    assert exact(checkpoint.restore(path)) == exact(VALUES["new"])


def test_what_is_no_checkpoint_is_not_removed_with_what_a_killed_save_left(tmp_path):
    """It was put into the old directory in the moment in which it was taken out."""
    path = tmp_path / "model"
    checkpoint.save(path, VALUES["old"])
    old = _files.place_of(path) / "old"
    old.mkdir(parents=True)
    (old / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"it holds 'notes.txt' at .*bridge-save/old"):
        checkpoint.save(path, VALUES["new"], overwrite=True)
    assert (old / "notes.txt").read_text() == "x"
    assert exact(checkpoint.restore(path)) == exact(VALUES["old"])


def test_a_save_waits_for_another_one_to_the_same_path(tmp_path):
    path = tmp_path / "model"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with _publish.publishing(path, overwrite=False) as new:
            second = pool.submit(checkpoint.save, path, VALUES["new"], overwrite=True)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)
            shutil.copytree(_made(tmp_path / "elsewhere"), new)
        second.result()
    assert exact(checkpoint.restore(path)) == exact(VALUES["new"])
    assert {child.name for child in tmp_path.iterdir()} == {"model", "elsewhere"}


def _made(path):
    checkpoint.save(path, VALUES["old"])
    return path


def test_a_folder_that_is_no_checkpoint_comes_back_after_a_save_was_killed(tmp_path):
    """Between the last look and the first rename something can be put into a directory."""
    path = tmp_path / "model"
    old = _files.place_of(path) / "old"
    old.mkdir(parents=True)
    (old / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"it holds 'notes.txt'"):
        checkpoint.save(path, VALUES["new"], overwrite=True)
    assert (path / "notes.txt").read_text() == "x"
    assert [child.name for child in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_another_save_removes_is_made_again(tmp_path, monkeypatch):
    path, flock, removals = tmp_path / "model", fcntl.flock, [1]

    def lock(descriptor, operation):
        if removals:
            removals.clear()
            _files.place_of(path).rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    checkpoint.save(path, VALUES["old"])

    assert removals == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_needs_no_locks_of_the_system(tmp_path, monkeypatch):
    def lock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", lock)
    for name in ("old", "new"):
        checkpoint.save(tmp_path / "model", VALUES[name], overwrite=True)
    assert exact(checkpoint.restore(tmp_path / "model")) == exact(VALUES["new"])
    assert [child.name for child in tmp_path.iterdir()] == ["model"]


FULL = """
import sys
import numpy as np
from bridge import checkpoint
from bridge.checkpoint import CheckpointError

folder = sys.argv[1]
if sys.argv[2] == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
old, new = ({"params": {"w": np.random.default_rng(0).random(n)}} for n in (10, 10**6))
checkpoint.save(f"{folder}/model", old)
for path, options in (("model", {"overwrite": True}), ("other/one", {})):
    try:
        checkpoint.save(f"{folder}/{path}", new, **options)
    except CheckpointError as error:
        print(error)
import os
print(sorted(os.listdir(folder)))
restored = checkpoint.restore(f"{folder}/model")
np.testing.assert_array_equal(restored["params"]["w"], old["params"]["w"])
"""


def test_a_full_disk_is_one_error_of_one_line(tmp_path):
    """On a disk of its own where this process may mount one, else with a limit for files."""
    program = tmp_path / "program.py"
    program.write_text(FULL)
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [sys.executable, str(program), str(folder)]
    mount = f"mount -t tmpfs -o size=1m tmpfs {folder}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    can_mount = (
        shutil.which("unshare")
        and not subprocess.run([*alone, mount], capture_output=True, check=False).returncode
    )
    if can_mount:
        command = [*alone, f'{mount} && exec "$@"', "sh", *command, "disk"]
    else:
        command = [*command, "limit"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reason = os.strerror(errno.ENOSPC if can_mount else errno.EFBIG)
    *errors, left = done.stdout.splitlines()
    assert len(errors) == 2
    for line, path in zip(errors, ("model", "other/one"), strict=True):
        assert line.startswith(f"no checkpoint could be saved at {folder}/{path}. {reason}")
    assert left == "['model']"
    # Orbax logs what it raises, with tracebacks.
    assert "Traceback" not in done.stderr


def test_of_two_saves_at_once_one_is_told_that_it_came_too_late(tmp_path):
    together = threading.Barrier(2)

    def write(number):
        together.wait()
        with _publish.publishing(tmp_path / "model", overwrite=False) as new:
            new.mkdir()
            (new / "number").write_text(str(number))
        return number

    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(write, number) for number in range(2)]
    errors = [future.exception() for future in futures]
    (winner,) = (number for number, error in enumerate(errors) if error is None)
    assert isinstance(errors[1 - winner], CheckpointError)
    assert "there is something already at" in str(errors[1 - winner])
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "number").read_text() == str(winner)


def test_what_another_program_puts_at_the_path_meanwhile_is_left_alone(tmp_path):
    path = tmp_path / "model"

    def save_and_disturb():
        with _publish.publishing(path, overwrite=False) as new:
            new.mkdir()
            path.mkdir()
            (path / "notes.txt").write_text("x")

    with pytest.raises(CheckpointError, match="there is something already at"):
        save_and_disturb()
    assert (path / "notes.txt").read_text() == "x"
    assert [child.name for child in tmp_path.iterdir()] == ["model"]


def test_what_is_no_checkpoint_any_more_when_it_is_taken_out_is_put_back(tmp_path, monkeypatch):
    """Between the last look and the first rename something can be put into a directory."""
    path = tmp_path / "model"
    checkpoint.save(path, VALUES["old"])
    rename = os.rename

    def rename_late(a, b):
        (path / "notes.txt").write_text("x") if a == path else None
        rename(a, b)

    monkeypatch.setattr(os, "rename", rename_late)
    with pytest.raises(CheckpointError, match=r"it holds 'notes.txt'"):
        checkpoint.save(path, VALUES["new"], overwrite=True)
    assert (path / "notes.txt").read_text() == "x"
    assert exact(checkpoint.restore(path)) == exact(VALUES["old"])
    assert [child.name for child in tmp_path.iterdir()] == ["model"]


def test_if_the_last_step_cannot_be_undone_the_error_says_where_both_are(tmp_path, monkeypatch):
    path = tmp_path / "model"
    checkpoint.save(path, VALUES["old"])
    rename = os.rename

    def refuse(a, b):
        if b == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(a, b)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(path, VALUES["new"], overwrite=True)
    aside = _files.place_of(path)
    for name, values in VALUES.items():
        assert str(aside / name) in str(caught.value)
        assert exact(checkpoint.restore(aside / name)) == exact(values)
    # Until then the old one is read, and the next save puts it back.
    assert exact(checkpoint.restore(path)) == exact(VALUES["old"])
    monkeypatch.undo()
    checkpoint.save(path, VALUES["new"], overwrite=True)
    assert [child.name for child in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_by_the_user_leaves_nothing_behind(tmp_path, error):
    checkpoint.save(tmp_path / "model", VALUES["old"])

    def interrupted(path):
        with _publish.publishing(path, overwrite=True) as new:
            new.mkdir()
            raise error

    for path in ("model", "a/b/c"):
        with pytest.raises(error):
            interrupted(tmp_path / path)
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert exact(checkpoint.restore(tmp_path / "model")) == exact(VALUES["old"])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.mkdir(), "an empty directory"),
        (lambda path: path.write_text("x"), "a file"),
        (lambda path: path.write_bytes(b""), "a file"),
        (lambda path: path.symlink_to("elsewhere"), "a symbolic link"),
        (os.mkfifo, "neither a directory nor a file"),
        (lambda path: checkpoint.save(path / "1", VALUES["old"]), "it holds '1'"),
    ],
)
def test_save_replaces_nothing_but_a_checkpoint(tmp_path, make, found):
    path = tmp_path / "model"
    make(path)
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=found if overwrite else "overwrite=True"):
            checkpoint.save(path, VALUES["new"], overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_save_does_not_replace_the_current_directory(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "model", VALUES["old"])
    for directory in ("model", "model/variables"):
        monkeypatch.chdir(tmp_path / directory)
        for path in (tmp_path / "model", "." if directory == "model" else ".."):
            with pytest.raises(CheckpointError, match="the current directory"):
                checkpoint.save(path, VALUES["new"], overwrite=True)
    assert exact(checkpoint.restore(tmp_path / "model")) == exact(VALUES["old"])


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_save_replaces_what_orbax_wrote(tmp_path, use_ocdbt, use_zarr3):
    tree = {"params": {"a": {"kernel": jnp.ones((2, 3)), "n": 3, "s": "text"}, "b": np.ones(2)}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as orbax:
        orbax.save(tmp_path / "tree", args=ocp.args.PyTreeSave(tree))
    for name, args in (("one", ocp.args.StandardSave), ("two", checkpoint.save_args)):
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
        with ocp.CheckpointManager(tmp_path / name, options=options) as manager:
            manager.save(0, args=args(VALUES["old"]), metrics={"loss": 1.0})
        with pytest.raises(CheckpointError, match="it holds '0'"):
            checkpoint.save(tmp_path / name, VALUES["new"], overwrite=True)
    for name in ("tree", "one/0", "two/0"):
        checkpoint.save(tmp_path / name, VALUES["new"], overwrite=True)
        assert exact(checkpoint.restore(tmp_path / name)) == exact(VALUES["new"])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{tmp}/file/model", "Not a directory"),
        ("{tmp}/file/above/model", "Not a directory"),
        ("gs://bucket/model", "gcsfs"),
        ("s3://bucket/model", "s3fs"),
        ("unheard-of://bucket/model", "unheard-of://"),
    ],
)
def test_a_path_that_cannot_be_is_an_error_of_one_line(tmp_path, path, reason):
    (tmp_path / "file").write_text("x")
    path = path.format(tmp=tmp_path)
    for act in (
        lambda: checkpoint.save(path, VALUES["new"]),
        lambda: checkpoint.save(path, VALUES["new"], overwrite=True),
        lambda: checkpoint.restore(path),
        lambda: checkpoint.layout(path),
        lambda: checkpoint.verify(path),
    ):
        with pytest.raises(bridge.BridgeError) as caught:
            act()
        assert len(str(caught.value).splitlines()) == 1
        if not isinstance(caught.value, CheckpointNotFoundError):
            assert reason in str(caught.value)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_missing_directories_are_made_and_removed_if_the_save_fails(tmp_path):
    checkpoint.save(tmp_path / "a" / "b" / "model", VALUES["new"])
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "a" / "c" / "d" / "model", {"params": {"w": object()}})
    assert [child.name for child in (tmp_path / "a").iterdir()] == ["b"]
