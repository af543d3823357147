"""Measures saving and restoring, with and without digests, beside plain orbax.

    python -m benchmarks.checkpoints --rounds 5
    python -m benchmarks.checkpoints --model '20,000 leaves' --rounds 1
    python -m benchmarks.checkpoints --leaves 4000

All variants take turns in each round, in one process, after a small model has warmed all of them
up; the medians of the rounds are shown, and their ratio to plain orbax. Seconds on the wall count
the disk, a temporary directory; CPU seconds of the process do not.

A model of 20,000 leaves takes 5 minutes a round, so it gets one round unless `--rounds` says more.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

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
    blocks: dict[str, dict[str, jax.Array]] = {}
    for i in range(count):
        blocks.setdefault(f"block_{i // 10}", {})[f"w{i % 10}"] = jnp.ones((4, 8)) + i // 10
    return {"params": blocks}


_LARGE = 10_000
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


Seconds: TypeAlias = tuple[float, float]
"""On the wall, and of the process's CPUs."""


def measure(tree: Any, rounds: int) -> dict[tuple[str, str], list[Seconds]]:
    """Seconds of each variant in each round."""
    seconds: dict[tuple[str, str], list[Seconds]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, save in SAVES.items():
                took = timed(save, Path(folder) / name, tree)
                seconds.setdefault(("save", name), []).append(took)
            for name, (saved, restore) in RESTORES.items():
                took = timed(restore, Path(folder) / saved, tree)
                seconds.setdefault(("restore", name), []).append(took)
    return seconds


def timed(function: Callable[..., Any], *arguments: Any) -> Seconds:
    """The seconds that a call takes until its arrays are there."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="5, or 1 for 10,000 leaves and more")
    parser.add_argument("--model", choices=MODELS, action="append", help="one of the three models")
    parser.add_argument("--leaves", type=int, action="append", help="a model of so many leaves")
    arguments = parser.parse_args()
    chosen = {name: MODELS[name] for name in arguments.model or ()}
    for count in arguments.leaves or ():
        chosen[f"{count:,} leaves"] = functools.partial(many, count)
    measure(many(10), 1)
    for model, make in (chosen or MODELS).items():
        tree = jax.block_until_ready(make())
        is_large = len(jax.tree.leaves(tree)) >= _LARGE
        found = measure(tree, arguments.rounds or (1 if is_large else 5))
        for (what, name), values in found.items():
            text = f"{model:14} {what:8} {name:16}"
            for own, plain in zip(_medians(values), _medians(found[what, "orbax"]), strict=True):
                text += f" {1e3 * own:9.1f} ms {own / plain:6.2f}"
            print(text, flush=True)


def _medians(values: list[Seconds]) -> list[float]:
    return [statistics.median(column) for column in zip(*values, strict=True)]


if __name__ == "__main__":
    main()
