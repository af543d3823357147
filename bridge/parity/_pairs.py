"""Pairs the calls of one model with those of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from bridge._layers.table import known_base

from ._layouts import LayerPath, Layouts, ValuesBelow
from ._recorder import LayerCall, Trace


def paired(
    a: Trace, b: Trace, layouts: Layouts
) -> tuple[list[tuple[LayerCall, LayerCall]], list[LayerCall], list[LayerCall]]:
    """Puts the calls of two traces together.

    By the values of their layers; then, for layers without values, by their class and their place
    between calls that are together already. Returns the pairs in `a`'s order of execution, and the
    calls without a counterpart of `a` and of `b`.
    """
    found = _by_values(a.calls, b.calls, layouts)
    found |= _between(a.calls, b.calls, found)
    taken = set(found.values())
    return (
        [(a.calls[i], b.calls[found[i]]) for i in sorted(found)],
        [call for i, call in enumerate(a.calls) if i not in found],
        [call for j, call in enumerate(b.calls) if j not in taken],
    )


def _by_values(a: Sequence[LayerCall], b: Sequence[LayerCall], layouts: Layouts) -> dict[int, int]:
    """The calls of layers that hold the same values, in order of execution.

    A layer that is stacked on one side is several on the other, and a scan calls it once for each.
    """
    groups: dict[Any, tuple[list[int], list[int]]] = {}
    for side, calls in enumerate((a, b)):
        own = layouts.values_below and layouts.values_below[side]
        keys = _keys({call.path for call in calls}, own)
        for number, call in enumerate(calls):
            key = keys[call.path], call.method
            groups.setdefault(key, ([], []))[side].append(number)
    found: dict[int, int] = {}
    for first, second in groups.values():
        is_one = len({a[i].path for i in first}) == len({b[j].path for j in second}) == 1
        # Layers that one side has fused are called less often there.
        if is_one or len(first) == len(second):
            found |= zip(first, second, strict=False)
    return found


def _keys(paths: Set[LayerPath], values: ValuesBelow | None) -> dict[LayerPath, Any]:
    """What the path of a layer has in common with those of its counterparts.

    Without `values`, the path itself. Otherwise the values below it, or below the layer around it
    and its name there; and how many layers with just these are within, as innermost ones go
    together. The models themselves are counterparts in any case.
    """
    if values is None:
        return {path: path for path in paths}
    keys: dict[LayerPath, Any] = {(): ()}
    inner: dict[Any, list[LayerPath]] = {}
    for path in sorted(paths - {()}, key=len, reverse=True):
        length = max((n for n in range(len(path) + 1) if path[:n] in values), default=0)
        held = values.get(path[:length]), path[length:]
        same = inner.setdefault(held, [])
        depths = [keys[other][-1] for other in same if other[: len(path)] == path]
        keys[path] = (*held, 1 + max(depths, default=0))
        same.append(path)
    return keys


def _between(
    a: Sequence[LayerCall], b: Sequence[LayerCall], found: Mapping[int, int]
) -> dict[int, int]:
    """Layers of one class between the same two calls; without values their names tell nothing.

    A layer of Flax's may call others: in Linen the cell of an `RNN` is beside it.
    """
    back = {j: i for i, j in found.items()}
    groups: dict[Any, tuple[list[int], list[int]]] = {}
    for side, calls in enumerate((a, b)):
        anchor = -1
        for number, call in enumerate(calls):
            pair = number if side == 0 and number in found else back.get(number) if side else None
            if pair is not None:
                anchor = pair
            elif call.is_leaf or known_base(call.layer) is not None:
                key = anchor, call.module, call.method
                groups.setdefault(key, ([], []))[side].append(number)
    return {i: j for first, second in groups.values() for i, j in zip(first, second, strict=False)}
