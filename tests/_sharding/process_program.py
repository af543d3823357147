"""One of the two processes that `test_processes.py` starts, with 4 devices of the mesh each.

A process writes the shards that it holds by path and index, so that no collective has a part in the
comparison.
"""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import processes
from bridge import checkpoint
from tests._sharding.process_models import RUNS, live, shards

# The seconds after which a process ends, should its test have gone without ending it.
LIFETIME = 120


def listening():
    """The local addresses that this process listens on, in the kernel's notation."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    # Address, state and inode are the second, the fourth and the tenth word; 0A is LISTEN.
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def run_models(process, folder, mesh):
    """Writes the shards of every stage of every model."""
    for name in RUNS:
        for stage, model in live(name, mesh, folder).items():
            np.savez(folder / f"{name}.{stage}.{process}.npz", **shards(model))
    (folder / f"listening.{process}.json").write_text(json.dumps(listening()))


def counted(mesh, start):
    """Variables with known values: shards, copies, and an array that is each process's own."""
    values = start + np.arange(64, dtype=np.float32).reshape(8, 8)

    def array(value, *names):
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    params = {
        "kernel": array(values, "data", "model"),
        "start": array(np.full((4,), start, np.float32)),
    }
    return {"params": params, "counter": {"step": jnp.asarray(start, jnp.int32)}}


def stop_before_arrays(marker):
    """The next save stops before this process writes an array."""

    async def async_save(self, directory, *args, **kwargs):
        _stop(marker)

    ocp.PyTreeCheckpointHandler.async_save = async_save


def stop_before_commit(marker):
    """The next save stops when its arrays are written and nothing is committed."""

    def finalize(self, directory):
        _stop(marker)

    ocp.CompositeCheckpointHandler.finalize = finalize


def _stop(marker):
    marker.touch()
    signal.pause()


STOPS = {"arrays": stop_before_arrays, "commit": stop_before_commit}


def run_interrupted(process, folder, mesh, victim, where, second):
    """Saves a checkpoint, and then one that the victim stops in."""
    checkpoint.save(folder / "first", counted(mesh, 100))
    restored = checkpoint.restore(folder / "first", counted(mesh, 0), verify=True)
    assert int(restored["counter"]["step"]) == 100
    if process == victim:
        STOPS[where](folder / "stopped")
    checkpoint.save(folder / second, counted(mesh, 200), overwrite=True)


def main(process, port, folder, *interruption):
    """Runs one process; the others of its arguments are the same for both."""
    signal.alarm(LIFETIME)
    # The survivor of a pair is waited for; two that live may be slow.
    heartbeat = 10 if interruption else LIFETIME
    processes.join(process, port, heartbeat=heartbeat, shutdown=LIFETIME)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    if interruption:
        victim, where, second = interruption
        run_interrupted(process, folder, mesh, victim, where, second)
    else:
        run_models(process, folder, mesh)
