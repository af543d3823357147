"""Computes the share of the parameters that native layers hold, and what keeps the rest Linen."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax

from bridge.rewrite.observe._records import Path
from bridge.rewrite.plan._plans import ClassPlan, Program


def native_share(
    program: Program, plans: Mapping[type, ClassPlan]
) -> tuple[float, Mapping[str, float]]:
    """The share of the parameters of all entries that native NNX layers hold.

    The program has the models as they were traced first, and `plans` what became of each class in
    the end. Returns the share, from 0 to 1, and by class name, largest first, the share that each
    class keeps from being native: the parameters in layers that stay Linen in the class and in what
    it holds.
    """
    linen = {
        making.site: plan.name
        for plan in plans.values()
        for slot in plan.slots.values()
        if slot.is_wrapped
        for making in slot.makings
    }
    makings = [each for each in program.records.makings if each.run < program.entries]
    wrapped = {(each.run, each.path): linen[each.site] for each in makings if each.site in linen}

    def keeper(run: int, path: Path) -> str | None:
        """The class that keeps a parameter from being native, None if it is native."""
        for length in range(len(path) + 1):
            if (run, path[:length]) in wrapped:
                held = program.records.instances.get((run, path[:length]))
                # A class that is wrapped because it stays Linen is the one to change.
                plan = plans.get(held.cls) if held is not None else None
                is_left = plan is not None and plan.refusal is not None
                return plan.name if plan and is_left else wrapped[run, path[:length]]
        for length in reversed(range(len(path) + 1)):
            instance = program.records.instances.get((run, path[:length]))
            plan = plans.get(instance.cls) if instance is not None else None
            if plan is not None:
                return None if plan.refusal is None else plan.name
            if instance is not None and instance.cls in program.unreadable:
                return instance.cls.__name__
        return program.roots[run].cls.__name__

    counts: collections.Counter[str | None] = collections.Counter()
    for run in range(program.entries):
        params: Any = program.records.variables[run].get("params", {})
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
            path = tuple(str(key.key) for key in keys if isinstance(key, jax.tree_util.DictKey))
            counts[keeper(run, path)] += leaf.size
    # A model without parameters has none that are not native.
    total = sum(counts.values()) or 1
    left = {name: n / total for name, n in counts.most_common() if name is not None}
    return (1.0 if not left else counts[None] / total), left
