"""`latest` in the place of a step: the newest checkpoint in a directory of several."""

from __future__ import annotations

import re
from typing import Any

from bridge._errors import CheckpointNotFoundError

LATEST = "latest"
# `100` and `step_100` of a CheckpointManager, `checkpoint_100` of flax.training.
_STEP = re.compile(r"(?P<prefix>.*[^\d.])?(?P<number>\d+(\.\d+)?)")


def latest_step(where: Any) -> Any:
    """The checkpoint that a path ending in `latest` means; any other path as it is.

    A step whose directory is empty was never written, and does not count.

    Raises:
      CheckpointNotFoundError: the directory has no steps, or steps under several names.
    """
    if where.name != LATEST or where.exists() or not where.parent.is_dir():
        return where
    steps: dict[str, list[tuple[float, Any]]] = {}
    for child in where.parent.iterdir():
        match = _STEP.fullmatch(child.name)
        if match and not _is_empty(child):
            steps.setdefault(match["prefix"] or "", []).append((float(match["number"]), child))
    if not steps:
        raise CheckpointNotFoundError("there are no steps in", where.parent, "Give another path.")
    if len(steps) > 1:
        names = sorted(f"{prefix}..." for prefix in steps)
        raise CheckpointNotFoundError(
            "there are steps under several names in", where.parent, f"They begin with {names}."
        )
    (own,) = steps.values()
    return max(own, key=lambda step: step[0])[1]


def _is_empty(step: Any) -> bool:
    return step.is_dir() and next(iter(step.iterdir()), None) is None
