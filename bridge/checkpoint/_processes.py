"""What the processes of one program tell each other while they save or restore together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridge._errors import CheckpointError


def is_first() -> bool:
    """Whether this process does what is done once."""
    return jax.process_index() == 0


class Agreement:
    """A block that ends well on all processes, or with an error on all of them.

    Without it one process would go on with the old model, and the others with the new one; or it
    would wait for a process that has given up.
    """

    def __init__(self, path: object, failure: str = "could not restore"):
        self._path = path
        self._failure = failure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if jax.process_count() == 1:
            return
        failed = multihost_utils.process_allgather(np.asarray(error is not None))
        if error is None and failed.any():
            raise CheckpointError(
                f"processes {[i for i, bad in enumerate(failed) if bad]} {self._failure}",
                self._path,
                "Their errors tell why. Nothing was changed in memory.",
            )


def from_first(number: int) -> int:
    """A 64-bit number of the first process, on all processes."""
    if jax.process_count() == 1:
        return number
    # JAX has no 64-bit integers by default.
    halves = np.asarray([number >> 32, number & 0xFFFFFFFF], np.uint32)
    high, low = multihost_utils.broadcast_one_to_all(halves)
    return int(high) << 32 | int(low)


def summed(numbers: np.ndarray) -> np.ndarray:
    """Sums of 64-bit numbers over all processes, modulo 2**64."""
    if jax.process_count() == 1 or not numbers.size:
        return numbers
    gathered = multihost_utils.process_allgather(numbers.view(np.uint32))
    return np.ascontiguousarray(gathered).view(np.uint64).sum(axis=0, dtype=np.uint64)
