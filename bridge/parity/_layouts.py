"""The pairs of values and of layers of two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from flax import nnx

from bridge import port
from bridge._conversion.convert import linen_to_nnx
from bridge._conversion.neutral import Address
from bridge._errors import path_text
from bridge._layers.table import known_base

from ._models import Model
from ._numbers import is_comparable
from ._recorder import LayerCall, Trace

AddressedValues: TypeAlias = dict[Address, Any]
LayerPath: TypeAlias = tuple[str, ...]
ValuesBelow: TypeAlias = Mapping[LayerPath, frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The correspondence of two models.

    Attributes:
      convert: values of `a` by address -> the same by `b`'s addresses, in `b`'s layout. What has no
        place in `b` is left out.
      sources: the values of `a` that a value of `b` is made of, empty if that must be zero.
      values_below: for `a` and for `b`, numbers for the values below each path. Values that are
        made of each other have one number. None if both models have the same paths.
      plan: the port plan that says so, None if both models have the same layout.
    """

    convert: Callable[[AddressedValues], AddressedValues]
    sources: Mapping[Address, tuple[Address, ...]]
    values_below: tuple[ValuesBelow, ValuesBelow] | None = None
    plan: Any = None

    def place(self, address: Address) -> str:
        """How the report writes a value of `b`: the place in `a`, and that in `b` if another."""
        own = path_text(*address)
        sources = [path_text(*source) for source in self.sources.get(address, ())]
        if len(sources) > 2:
            sources[1:-1] = ["…"]
        return own if not sources or sources == [own] else f"{', '.join(sources)} -> {own}"


def layouts_of(a: Model, b: Model, rules: Any) -> Layouts:
    """How two models correspond.

    By their paths, if both are Linen or both are NNX, wrapped or not, or if they have the same
    ones. Else `port.plan` says what belongs together. `rules` are those of `port.plan`; if there
    are any, it is asked in any case.
    """
    own, other = (set(map(as_text, model.values)) for model in (a, b))
    is_alike = own == other or a.is_linen is b.is_linen
    if rules is None and is_alike:
        return Layouts(by_text, {address: (address,) for address in own})
    first, second = a.native_variables(), b.native_variables()
    if not any(isinstance(side, nnx.Pytree | nnx.State) for side in (first, second)):
        # Both are Linen, and only the rules say that their paths differ; a plan wants one of each.
        second = linen_to_nnx(second)
    plan = port.plan(first, second, rules=rules)
    whole = {x: leaf.value for x, leaf in a.values.items() if is_comparable(leaf.value)}

    def convert(values: AddressedValues) -> AddressedValues:
        # All at once: a value of `b` may need several, and not all are requested.
        given = set(map(as_text, values))
        converted = by_text(plan.convert({**whole, **values}))
        # What is not an array, such as metadata in a collection of its own, has no sources.
        return {x: v for x, v in converted.items() if given.issuperset(sources.get(x, ()))}

    sources = {
        as_text(target): tuple(map(as_text, found))
        for target, found in plan.sources.items()
        if whole.keys() >= {*found}
    }
    pairs = [(source[1], own[1]) for own, found in sources.items() for source in found]
    return Layouts(convert, sources, _values_below(pairs), plan)


def as_text(address: Address) -> Address:
    """An address with the keys of its path as text, as the report writes it."""
    return address[0], tuple(map(str, address[1]))


def by_text(values: Mapping[Address, Any]) -> AddressedValues:
    """Values by `as_text` of their address."""
    return {as_text(address): value for address, value in values.items()}


def _values_below(
    pairs: Sequence[tuple[LayerPath, LayerPath]],
) -> tuple[ValuesBelow, ValuesBelow]:
    """`Layouts.values_below` for pairs of leaves that share values."""
    numbers = {leaf: n for n, pair in enumerate(pairs) for leaf in enumerate(pair)}
    before: dict[Any, int] = {}
    # One leaf may be made of several, and these in turn are the source of another one.
    while before != numbers:
        before = dict(numbers)
        for pair in pairs:
            leaves = list(enumerate(pair))
            numbers |= dict.fromkeys(leaves, min(numbers[leaf] for leaf in leaves))
    below: tuple[dict[LayerPath, set[int]], ...] = ({}, {})
    for (side, path), number in numbers.items():
        for length in range(len(path)):
            below[side].setdefault(path[:length], set()).add(number)
    first, second = ({path: frozenset(own) for path, own in side.items()} for side in below)
    return first, second


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
