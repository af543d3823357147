"""Pairs the calls of one model with those of the other."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge._layers.table import known_base

from ._captured import LayerCall, Trace
from ._layouts import LayerPath, Layouts, Stacks


@dataclasses.dataclass(frozen=True)
class Paired:
    """The calls of two models.

    The pairs are in `a`'s order of execution; `only_a` and `only_b` are the calls without a
    counterpart.
    """

    pairs: tuple[tuple[LayerCall, LayerCall], ...]
    only_a: tuple[LayerCall, ...]
    only_b: tuple[LayerCall, ...]


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A call, and where its layer is in the other model if that is known without looking there."""

    call: LayerCall
    elsewhere: LayerPath | None


def paired(a: Trace, b: Trace, layouts: Layouts) -> Paired:
    """Puts the calls of two traces together.

    By the paths that hold the same values; then, for layers without values, by their class and
    their place between calls that are together already; then by order, for what is left.
    """
    side_a = _unstacked(a.calls, layouts.stacks)
    side_b = _unstacked(b.calls, layouts.stacks_in_b)
    found = _by_path(side_a, side_b, layouts)
    for more in (_between, _in_order):
        found |= more([p.call for p in side_a], [p.call for p in side_b], found)
    taken = set(found.values())
    return Paired(
        tuple((side_a[i].call, side_b[found[i]].call) for i in sorted(found)),
        tuple(placed.call for i, placed in enumerate(side_a) if i not in found),
        tuple(placed.call for j, placed in enumerate(side_b) if j not in taken),
    )


def _by_path(a: Sequence[_Placed], b: Sequence[_Placed], layouts: Layouts) -> dict[int, int]:
    """Those that either side says where to find on the other."""
    own, by_a = [p.call.path for p in b], [p.elsewhere for p in b]
    in_b = {(path, b[j].call.method, n): j for path, n, j in _counted(own, b)}
    in_a = {(path, b[j].call.method, n): j for path, n, j in _counted(by_a, b)}
    mapped = [p.elsewhere or layouts.path_in_b(p.call.path) for p in a]
    # A layer that holds all parameters of its model has them where the other model has all of its
    # own. The models themselves are counterparts all the same.
    if () in own and any(not p.call.path for p in a):
        mapped = [() if not p.call.path else to or None for p, to in zip(a, mapped, strict=True)]
    found: dict[int, int] = {}
    for path, n, i in _counted(mapped, a):
        if (j := in_b.pop((path, a[i].call.method, n), None)) is not None:
            found[i] = j
    taken = set(found.values())
    for i, placed in enumerate(a):
        j = in_a.get((placed.call.path, placed.call.method, placed.call.nth))
        if i not in found and j is not None and j not in taken:
            found[i] = j
    return found


def _counted(
    paths: Sequence[LayerPath | None], calls: Sequence[_Placed]
) -> Iterator[tuple[LayerPath, int, int]]:
    """(path, which call of that method at that path, the call's number)."""
    counts: collections.Counter[Any] = collections.Counter()
    for number, path in enumerate(paths):
        if path is not None:
            key = path, calls[number].call.method
            yield path, counts[key], number
            counts[key] += 1


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


def _in_order(
    a: Sequence[LayerCall], b: Sequence[LayerCall], found: Mapping[int, int]
) -> dict[int, int]:
    """What is left, if it is the same on both sides as far as shapes tell."""
    taken = set(found.values())
    rest_a = [i for i, call in enumerate(a) if i not in found and call.is_leaf]
    rest_b = [j for j, call in enumerate(b) if j not in taken and call.is_leaf]
    same = [_shapes(a[i]) for i in rest_a] == [_shapes(b[j]) for j in rest_b]
    return dict(zip(rest_a, rest_b, strict=True)) if same else {}


def _unstacked(calls: Sequence[LayerCall], stacks: Stacks) -> list[_Placed]:
    """The calls of layers that are stacked, as those of the items that they are on the other side.

    A scan calls one layer for each item. The items have the stacked layer's path with their index
    behind that of the outermost stacked layer: `blocks/3/norm`.
    """
    if not stacks:
        return [_Placed(call, None) for call in calls]
    indices = _item_indices(calls, stacks)
    placed, counts = [], collections.Counter[Any]()
    for number, call in enumerate(calls):
        elsewhere, path = None, call.path
        if number in indices:
            root, index = indices[number]
            elsewhere = _item(path, index, stacks)
            path = (*root, str(index), *path[len(root) :])
        key = path, call.method
        placed.append(_Placed(dataclasses.replace(call, path=path, nth=counts[key]), elsewhere))
        counts[key] += 1
    return placed


def _item_indices(calls: Sequence[LayerCall], stacks: Stacks) -> dict[int, tuple[LayerPath, int]]:
    """(outermost stacked layer, index of the item) by the number of the call.

    A call belongs to the item whose block ends next. If the block itself is not called, its layers
    are counted one by one.
    """
    roots = [p for p in stacks if not any(p[:n] in stacks for n in range(1, len(p)))]
    totals = collections.Counter((call.path, call.method) for call in calls)
    found: dict[int, tuple[LayerPath, int]] = {}
    for root in roots:
        size, current = len(stacks[root]), -1
        whole = {m for p, m in totals if p == root and totals[p, m] % size == 0}
        for number in reversed(range(len(calls))):
            call = calls[number]
            if call.path[: len(root)] != root:
                continue
            if call.path == root and call.method in whole:
                current = call.nth % size
            if whole and current >= 0:
                found[number] = root, current
            elif not whole and totals[call.path, call.method] % size == 0:
                found[number] = root, call.nth % size
    return found


def _item(path: LayerPath, index: int, stacks: Stacks) -> LayerPath:
    """Where an item of a stacked layer is on the other side."""
    if path in stacks:
        return stacks[path][index]
    # A layer without variables has its name from the layer around it.
    return (*_item(path[:-1], index, stacks), path[-1])


def _shapes(call: LayerCall) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in call.outputs.values()]
