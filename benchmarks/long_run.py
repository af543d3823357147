"""A long training run that is killed again and again, beside one that is left alone.

    python -m benchmarks.long_run
    python -m benchmarks.long_run --steps 200 --every 20 --kills 3

A mixed model, half Linen and half NNX, is trained with dropout, statistics and Adam, and saved
every so many steps. One process trains without a stop. Then processes do the same that are ended by
SIGKILL, half of them at a random step and half of them within a save; each goes on from the newest
complete checkpoint. The losses of all steps have to be the same bits, and within a process the live
arrays, the open files and the memory may not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx

import bridge
from bridge import checkpoint

WIDTH = 16
BATCH = 8
# What memory may grow by after the second checkpoint of a process, which allocators need anyway.
_SPARE_MIB = 24


class LinenHalf(nn.Module):
    """A layer with statistics and dropout."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps f32[N, W] to f32[N, W]."""
        x = nn.BatchNorm()(nn.Dense(WIDTH)(x))
        return nn.Dropout(0.2)(nn.relu(x))


class Mixed(nnx.Module):
    """A Linen half, and an NNX half with dropout and a counter."""

    def __init__(self, rngs: nnx.Rngs):
        self.linen = bridge.ToNNX(LinenHalf(), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps f32[N, W] to f32[N, 1]."""
        self.calls[...] += 1
        return self.head(self.dropout(self.linen(x)))


class State(NamedTuple):
    """What a process looks like at one of its checkpoints.

    Attributes:
        process: which one it is.
        step: how many steps have been made.
        arrays: how many arrays are alive.
        files: how many files are open.
        memory: the resident memory in MiB.
    """

    process: int
    step: int
    arrays: int
    files: int
    memory: float


def make_training() -> tuple[Mixed, nnx.Optimizer[Mixed]]:
    """A model in training mode, and its optimizer."""
    model = Mixed(nnx.Rngs(0, dropout=1))
    model.train()
    bridge.lazy_init(model, jnp.ones((BATCH, WIDTH)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model: Mixed, optimizer: nnx.Optimizer[Mixed], step: jax.Array) -> jax.Array:
    """One step on the batch of that number; returns its loss."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (BATCH, WIDTH))
    y = jnp.sin(x.sum(1, keepdims=True))

    def loss_of(model: Mixed) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder: Path, steps: int, every: int) -> None:
    """Trains from the newest checkpoint in a folder on, and writes the loss of each step there."""
    model, optimizer = make_training()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder / "run", options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            latest = manager.directory / str(done)
            checkpoint.restore(latest, model, extra={"optimizer": optimizer})
        with open(folder / "losses", "ab", buffering=0) as losses:
            losses.truncate(4 * done)
            for step in range(done, steps):
                loss = train_step(model, optimizer, jnp.asarray(step))
                losses.write(np.asarray(loss, np.float32).tobytes())
                if (step + 1) % every == 0:
                    manager.wait_until_finished()
                    _record(folder, step + 1)
                    extra = {"optimizer": optimizer}
                    manager.save(step + 1, args=checkpoint.save_args(model, extra=extra))
            manager.wait_until_finished()


def _record(folder: Path, step: int) -> None:
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    files = len(os.listdir("/proc/self/fd"))
    state = State(os.getpid(), step, len(jax.live_arrays()), files, memory / 1024)
    with open(folder / "states", "a") as file:
        file.write(json.dumps(state) + "\n")


def losses_of(folder: Path) -> np.ndarray[Any, Any]:
    """The losses that are written so far."""
    path = folder / "losses"
    return np.frombuffer(path.read_bytes(), np.float32) if path.exists() else np.zeros(0)


def states_of(folder: Path) -> list[State]:
    """The states at all checkpoints of all processes."""
    return [State(*json.loads(line)) for line in (folder / "states").read_text().splitlines()]


def train_and_kill(
    folder: Path, steps: int, every: int, kills: int, *, first: int = 0
) -> list[str]:
    """Trains in processes of which all but the last are killed; says where each was.

    Args:
        folder: where losses, states and checkpoints are.
        steps: how many steps are made.
        every: how many steps are between two checkpoints.
        kills: how many processes are killed.
        first: the number of the first kill; those of odd numbers are within a save.
    """
    dice = random.Random(0)
    command = [sys.executable, "-m", "benchmarks.long_run", "--worker", str(folder)]
    command += ["--steps", str(steps), "--every", str(every)]
    told: list[str] = []
    for kill in range(first, first + kills):
        with subprocess.Popen(command) as process:
            try:
                told.append(_kill(process, folder, steps, every, in_save=kill % 2 == 1, dice=dice))
            finally:
                process.kill()
    subprocess.run(command, check=True)
    return told


def _kill(
    process: subprocess.Popen[bytes],
    folder: Path,
    steps: int,
    every: int,
    *,
    in_save: bool,
    dice: random.Random,
) -> str:
    """Kills a process at a step, or in the save after that step."""
    run = folder / "run"
    begun = _newest(run)
    last = begun + dice.randint(1, min(2 * every, max(steps - begun - 1, 1)))
    while process.poll() is None:
        written = len(losses_of(folder))
        unfinished = run.exists() and any(not path.name.isdecimal() for path in run.iterdir())
        if begun < written and (unfinished if in_save else written >= last):
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return f"{'in a save' if in_save else 'at a step'}: {len(losses_of(folder))} of {steps} steps"


def _newest(run: Path) -> int:
    steps = (
        [int(path.name) for path in run.iterdir() if path.name.isdecimal()] if run.exists() else []
    )
    return max(steps, default=0)


def problems(alone: Path, killed: Path) -> list[str]:
    """What is not as it has to be; nothing if all is well."""
    expected, found = losses_of(alone), losses_of(killed)
    told: list[str] = []
    if len(found) != len(expected):
        told.append(f"{len(found)} losses, {len(expected)} expected")
    elif different := np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32)).tolist():
        told.append(f"other losses at {len(different)} steps, the first is {different[0]}")
    for folder in (alone, killed):
        states = states_of(folder)
        for process in {state.process for state in states}:
            told += _growth([state for state in states if state.process == process])
    return told


def _growth(states: list[State]) -> list[str]:
    """What has grown since the second checkpoint of a process: the first one makes its helpers."""
    told: list[str] = []
    for state in states[2:]:
        for name, spare in (("arrays", 0), ("files", 0), ("memory", _SPARE_MIB)):
            before, after = getattr(states[1], name), getattr(state, name)
            if after > before + spare:
                told.append(f"{name} grew from {before} to {after} at step {state.step}")
    return told


def main() -> int:
    """Runs both, and says whether they agree; the exit status is 1 if they do not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        train(arguments.worker, arguments.steps, arguments.every)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        for path in (alone, killed):
            path.mkdir()
        train_and_kill(alone, arguments.steps, arguments.every, 0)
        for line in train_and_kill(killed, arguments.steps, arguments.every, arguments.kills):
            print("killed", line)
        first, last = states_of(alone)[1], states_of(alone)[-1]
        print(f"without a stop: {first}\n           then: {last}")
        found = problems(alone, killed)
        print("\n".join(found) or f"all {arguments.steps} losses are the same bits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
