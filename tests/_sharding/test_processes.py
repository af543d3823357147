"""Two processes of 4 devices do what one of 8 does, and a killed one costs no old checkpoint."""

import contextlib
import json
import os
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.processes import reserved_port
from bridge import checkpoint
from bridge.checkpoint import CheckpointError, CheckpointNotFoundError
from tests import processes
from tests._sharding import process_program
from tests._sharding.process_models import RUNS, live, shards

# Seconds for anything that processes are waited for.
PATIENCE = 100
# 127.0.0.1 as the kernel writes it: IPv4, and IPv4 within IPv6.
LOOPBACK_IN_HEX = {"0100007F", "0000000000000000FFFF00000100007F"}


@contextlib.contextmanager
def two_processes(folder, *interruption):
    """Starts both processes; they are gone when the block ends, however it ends."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # With the other flags of this process: results are compared with its own.
        "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=4", os.environ["XLA_FLAGS"]),
    }
    started = []
    with reserved_port() as port:
        try:
            for index in range(2):
                arguments = (index, port, folder, *interruption)
                log = log_of(folder, index)
                started.append(
                    processes.start(process_program.main, *arguments, stdout=log, env=environment)
                )
            yield started
        finally:
            for process in started:
                process.kill()
                process.join()


def log_of(folder, index):
    return folder / f"log.{index}.txt"


def logs(folder):
    return "\n".join(f"{index}: {log_of(folder, index).read_text()}" for index in range(2))


def codes_of(started):
    """The exit codes, when both have ended."""
    for process in started:
        process.join(PATIENCE)
    return [process.exitcode for process in started]


def wait_until(condition, started, folder):
    """Waits for a condition; processes that end meanwhile fail the test."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        ended = [process.exitcode for process in started]
        assert ended == [None, None], f"ended with {ended}\n{logs(folder)}"
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def mesh():
    axis_types = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes wrote that ran to their end."""
    folder = tmp_path_factory.mktemp("processes")
    with two_processes(folder) as started:
        assert codes_of(started) == [0, 0], logs(folder)
    return folder


@pytest.fixture(scope="module")
def single(mesh, tmp_path_factory):
    """Every model at every stage, in one process."""
    folder = tmp_path_factory.mktemp("single")
    return {name: live(name, mesh, folder) for name in RUNS}


def shards_of(folder, name, stage):
    """The shards that each of the two processes had."""
    return [dict(np.load(folder / f"{name}.{stage}.{index}.npz")) for index in range(2)]


@pytest.mark.parametrize("name", RUNS)
def test_created_values_are_those_of_one_process_bit_for_bit(folder, single, name):
    expected = shards(single[name]["created"])
    own = shards_of(folder, name, "created")
    assert own[0].keys() | own[1].keys() == expected.keys()
    for found in own:
        for place, shard in found.items():
            np.testing.assert_array_equal(shard, expected[place], strict=True)


@pytest.mark.parametrize("name", RUNS)
def test_a_process_has_no_shards_but_its_own(folder, name):
    path = {"nnx": "second/kernel/value", "linen": "0/params/second/kernel/value"}[name]
    for index, found in enumerate(shards_of(folder, name, "created")):
        # A process has a row of the mesh: four of the kernel's eight rows, two columns a device.
        rows = f"{4 * index}:{4 * index + 4}"
        expected = {f"{path} {rows},{column}:{column + 2}" for column in (0, 2, 4, 6)}
        assert {place for place in found if place.startswith(f"{path} ")} == expected


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stage", ["trained", "continued"])
def test_training_gives_the_numbers_of_one_process(folder, single, name, stage):
    expected = shards(single[name][stage])
    own = shards_of(folder, name, stage)
    assert own[0].keys() | own[1].keys() == expected.keys()
    for found in own:
        for place, shard in found.items():
            # gloo adds up in another order than one process does, which is a rounding or two.
            np.testing.assert_allclose(shard, expected[place], rtol=1e-5, atol=1e-7, strict=True)
    start = shards(single[name]["created"])
    assert any((start[place] != shard).any() for place, shard in expected.items())


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_restore_the_shards_that_they_saved(folder, name):
    saved, restored = (shards_of(folder, name, stage) for stage in ("trained", "restored"))
    for before, after in zip(saved, restored, strict=True):
        assert before.keys() == after.keys()
        for place, shard in before.items():
            np.testing.assert_array_equal(after[place], shard, strict=True)


@pytest.mark.parametrize("name", RUNS)
def test_one_process_restores_what_two_saved(folder, single, mesh, name):
    restored = shards(RUNS[name].restore(folder / name, mesh, single[name]["created"]))
    saved = shards_of(folder, name, "trained")
    assert saved[0].keys() | saved[1].keys() == restored.keys()
    for found in saved:
        for place, shard in found.items():
            np.testing.assert_array_equal(restored[place], shard, strict=True)


def test_the_processes_listen_on_the_loopback_interface_only(folder):
    for index in range(2):
        addresses = json.loads((folder / f"listening.{index}.json").read_text())
        assert addresses
        assert {address.split(":")[0] for address in addresses} <= LOOPBACK_IN_HEX


# Who is killed, where it is in its save, and whether that save replaces the first checkpoint.
@pytest.mark.parametrize(
    ("victim", "where", "second"), [(1, "arrays", "second"), (0, "commit", "first")]
)
def test_killing_a_process_in_a_save_leaves_the_previous_checkpoint(
    tmp_path, mesh, victim, where, second
):
    # A hidden directory beside the path, in which orbax begins one of its own.
    begun = f".{second}.bridge-save/new.orbax-checkpoint-tmp/variables.*/ocdbt.process_0/d/*"
    with two_processes(tmp_path, victim, where, second) as started:
        stopped = tmp_path / "stopped"
        wait_until(lambda: stopped.exists() and any(tmp_path.glob(begun)), started, tmp_path)
        started[victim].kill()
        # JAX ends a process whose peer is gone.
        codes = codes_of(started)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] not in (0, None)

    expected = 100 + np.arange(64, dtype=np.float32).reshape(8, 8)
    whole = checkpoint.restore(tmp_path / "first")
    np.testing.assert_array_equal(whole["params"]["kernel"], expected, strict=True)
    start = np.full(4, 100, np.float32)
    np.testing.assert_array_equal(whole["params"]["start"], start, strict=True)
    assert whole["counter"]["step"] == 100
    # The digests that two processes added up are those of the whole arrays.
    assert checkpoint.verify(tmp_path / "first") == 3
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    target = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)}
    sharded = checkpoint.restore(tmp_path / "first", {"params": target}, allow_unexpected=True)
    assert sharded["params"]["kernel"].sharding == columns
    np.testing.assert_array_equal(sharded["params"]["kernel"], expected, strict=True)

    # A first process that lives on removes it.
    left = list(tmp_path.glob(f".{second}.bridge-save"))
    assert len(left) == 1 or victim == 1
    for place in left:
        with pytest.raises(CheckpointError, match="unfinished save"):
            checkpoint.restore(place / "new.orbax-checkpoint-tmp")
    if second == "second":
        with pytest.raises(CheckpointNotFoundError) as caught:
            checkpoint.restore(tmp_path / second)
        assert all(place.name in str(caught.value) for place in left)

    # The next save removes what is left of it.
    checkpoint.save(tmp_path / second, {"params": {"w": jnp.ones(2)}}, overwrite=True)
    again = checkpoint.restore(tmp_path / second)
    np.testing.assert_array_equal(again["params"]["w"], np.ones(2, np.float32), strict=True)
    assert not list(tmp_path.glob(".*"))
