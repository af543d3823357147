"""What saving and restoring cost with and without digests, beside plain orbax.

    python -m benchmarks.checkpoints --rounds 5

All variants take turns in each round, in one process; the medians of the rounds are shown, and
their ratio to plain orbax. The files go to a temporary directory, so the disk counts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from bridge import checkpoint


def large() -> Any:
    """64 MB in 16 arrays."""
    keys = jax.random.split(jax.random.key(0), 16)
    return {"params": {f"w{i}": jax.random.normal(key, (1024, 1024)) for i, key in enumerate(keys)}}


def many(count: int) -> Any:
    """Arrays of 32 numbers in blocks of ten."""
    blocks = range(count // 10)
    return {
        "params": {f"block_{i}": {f"w{j}": jnp.ones((4, 8)) + i for j in range(10)} for i in blocks}
    }


MODELS: dict[str, Callable[[], Any]] = {
    "64 MB": large,
    "1,000 leaves": functools.partial(many, 1000),
    "20,000 leaves": functools.partial(many, 20_000),
}


def save_with_orbax(path: Path, tree: Any) -> None:
    """What a program without the bridge does."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def restore_with_orbax(path: Path, tree: Any) -> Any:
    """What a program without the bridge does."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(item=tree, restore_args=restore_args)
        return checkpointer.restore(path, args=args)


SAVES: dict[str, Callable[..., Any]] = {
    "orbax": save_with_orbax,
    "without digests": functools.partial(checkpoint.save, digests=False),
    "with digests": checkpoint.save,
}
RESTORES: dict[str, tuple[str, Callable[..., Any]]] = {
    "orbax": ("orbax", restore_with_orbax),
    "restore": ("with digests", checkpoint.restore),
    "restore, verify": ("with digests", functools.partial(checkpoint.restore, verify=True)),
    "verify alone": ("with digests", lambda path, tree: checkpoint.verify(path)),
}


def measure(tree: Any, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each variant in each round; of several rounds the first one is not counted."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + (rounds > 1)):
        with tempfile.TemporaryDirectory() as folder:
            for name, save in SAVES.items():
                took = timed(save, Path(folder) / name, tree)
                seconds.setdefault(("save", name), []).append(took)
            for name, (saved, restore) in RESTORES.items():
                took = timed(restore, Path(folder) / saved, tree)
                seconds.setdefault(("restore", name), []).append(took)
        if number == 0 and rounds > 1:
            seconds.clear()
    return seconds


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """The seconds that a call takes until its arrays are there."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    arguments = parser.parse_args()
    for model in arguments.model or MODELS:
        tree = jax.block_until_ready(MODELS[model]())
        found = measure(tree, arguments.rounds)
        for (what, name), values in found.items():
            median = statistics.median(values)
            ratio = median / statistics.median(found[what, "orbax"])
            print(f"{model:14} {what:8} {name:16} {1e3 * median:9.1f} ms {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
