"""The pairs of values and of layers of two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx

from bridge import port
from bridge._conversion.convert import linen_to_nnx
from bridge._conversion.neutral import Address
from bridge._errors import path_text

from ._models import Model
from ._numbers import is_comparable

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
