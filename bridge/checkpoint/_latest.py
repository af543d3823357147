"""`latest` in the place of a step: the newest checkpoint in a directory of several."""

from __future__ import annotations

import re
from typing import Any

from bridge._errors import CheckpointNotFoundError

LATEST = "latest"
# `100` and `step_100` of a CheckpointManager, `checkpoint_100` of flax.training.
_STEP = re.compile(r"(?P<prefix>.*[^\d.])?(?P<number>\d+(\.\d+)?)")


def latest_step(where: Any) -> Any:
    """The path that one with `latest` in it means; any other path as it is.

    Behind `latest` may stand what lies in the step, such as one of a manager's items. A step whose
    directory is empty was never written, and does not count.

    Raises:
      CheckpointNotFoundError: the directory has no steps, or steps under several names.
    """
    if LATEST not in where.parts or where.exists():
        return where
    parent = latest_step(where.parent)
    if where.name != LATEST or not parent.is_dir():
        return parent / where.name
    steps: dict[str, list[tuple[float, Any]]] = {}
    for child in parent.iterdir():
        match = _STEP.fullmatch(child.name)
        if match and not _is_empty(child):
            steps.setdefault(match["prefix"] or "", []).append((float(match["number"]), child))
    if not steps:
        raise CheckpointNotFoundError("there are no steps in", parent, "Give another path.")
    if len(steps) > 1:
        names = sorted(f"{prefix}..." for prefix in steps)
        raise CheckpointNotFoundError(
            "there are steps under several names in", parent, f"They begin with {names}."
        )
    (own,) = steps.values()
    return max(own, key=lambda step: step[0])[1]


def _is_empty(step: Any) -> bool:
    return step.is_dir() and next(iter(step.iterdir()), None) is None
