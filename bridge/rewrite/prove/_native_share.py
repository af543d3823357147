"""Computes the share of a model's parameters that native layers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from bridge.rewrite.observe._records import Path
from bridge.rewrite.plan._plans import ClassPlan, Program


def native_share(program: Program, plans: Mapping[type, ClassPlan]) -> float:
    """The share of the parameters that are in native NNX layers, from 0 to 1.

    Args:
        program: the model as it was traced first.
        plans: what became of each class in the end.
    """
    linen = {
        making.site
        for plan in plans.values()
        for slot in plan.slots.values()
        if slot.is_wrapped
        for making in slot.makings
    }
    makings = [each for each in program.records.makings if each.run == 0]
    wrapped = {each.path for each in makings if each.site in linen and each.path is not None}

    def is_native(path: Path) -> bool:
        if any(path[:length] in wrapped for length in range(len(path) + 1)):
            return False
        for length in reversed(range(len(path) + 1)):
            instance = program.records.instances.get((0, path[:length]))
            plan = plans.get(instance.cls) if instance is not None else None
            if plan is not None:
                return plan.refusal is None
            if instance is not None and instance.cls in program.unreadable:
                return False
        return False

    counts = {True: 0, False: 0}
    params: Any = program.records.variables[0].get("params", {})
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))
        counts[is_native(path)] += leaf.size
    total = sum(counts.values())
    # A model without parameters has none that are not native.
    return counts[True] / total if total else 1.0
