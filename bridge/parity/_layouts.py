"""The pairs of values and of layers of two models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx

from bridge import port
from bridge._conversion.convert import linen_to_nnx
from bridge._conversion.neutral import Address, Path
from bridge._errors import path_text

from ._models import Model
from ._numbers import is_comparable

AddressedValues: TypeAlias = dict[Address, Any]
LayerPath: TypeAlias = tuple[str, ...]
Stacks: TypeAlias = Mapping[LayerPath, tuple[LayerPath, ...]]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The correspondence of two models.

    Attributes:
      convert: values of `a` by address -> the same by `b`'s addresses, in `b`'s layout. What has no
        place in `b` is left out.
      sources: the values of `a` that a value of `b` is made of, empty if that must be zero.
      paths: the path of a layer of `a` -> that of the same layer of `b`; None for the same path.
      stacks: the path of a layer that is stacked in `a` -> those of the layers of `b` that are its
        items, by index.
      stacks_in_b: the same for layers that are stacked in `b`, with the paths of `a`.
      reshaped: the paths of the layers of `a` with values of another shape in `b`.
      plan: the port plan that says so, None if both models have the same layout.
    """

    convert: Callable[[AddressedValues], AddressedValues]
    sources: Mapping[Address, tuple[Address, ...]]
    paths: Mapping[LayerPath, LayerPath] | None = None
    stacks: Stacks = dataclasses.field(default_factory=dict)
    stacks_in_b: Stacks = dataclasses.field(default_factory=dict)
    reshaped: frozenset[LayerPath] = frozenset()
    plan: Any = None

    def path_in_b(self, path: LayerPath) -> LayerPath | None:
        """The path in `b` of a layer of `a`, None if it is not known."""
        if self.paths is None or not path:
            return path
        if path in self.paths:
            return self.paths[path]
        # A layer without variables has its name from the layer around it.
        *outer, name = path
        parent = self.path_in_b(tuple(outer))
        return None if parent is None else (*parent, name)

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

    order = {address: number for number, address in enumerate(whole)}
    sources = {
        as_text(target): tuple(map(as_text, sorted(found, key=order.__getitem__)))
        for target, found in plan.sources.items()
        if whole.keys() >= {*found}
    }
    pairs = [(source[1], own[1]) for own, found in sources.items() for source in found]
    back = [(path_b, path_a) for path_a, path_b in pairs]
    shapes, others = ({as_text(x): leaf.value for x, leaf in m.values.items()} for m in (a, b))
    reshaped = frozenset(
        found[0][1][:-1]
        for own, found in sources.items()
        if len(found) == 1 and _is_reshaped(shapes.get(found[0]), others.get(own))
    )
    return Layouts(
        convert, sources, _layer_paths(pairs), stacks_of(pairs), stacks_of(back), reshaped, plan
    )


def _is_reshaped(a: Any, b: Any) -> bool:
    both = is_comparable(a) and is_comparable(b)
    return both and a.size == b.size and a.shape != b.shape


def as_text(address: Address) -> Address:
    """An address with the keys of its path as text, as the report writes it."""
    return address[0], tuple(map(str, address[1]))


def by_text(values: Mapping[Address, Any]) -> AddressedValues:
    """Values by `as_text` of their address."""
    return {as_text(address): value for address, value in values.items()}


def _layer_paths(pairs: Sequence[tuple[LayerPath, LayerPath]]) -> dict[LayerPath, LayerPath]:
    """The layers that hold the same values; of nested ones the innermost go together."""
    by_values = _by_values(pairs)
    paths: dict[LayerPath, LayerPath] = {(): ()}
    below_a = _below(path_a for path_a, _ in pairs)
    for path in sorted(below_a, key=len, reverse=True):
        found = by_values.get(frozenset(below_a[path]), [])
        if path and found:
            # A layer that an inner path has taken is not available to an outer one.
            paths[path] = found.pop(found.index(max(found, key=len)))
    return paths


def stacks_of(
    pairs: Sequence[tuple[LayerPath, LayerPath]],
) -> dict[LayerPath, tuple[LayerPath, ...]]:
    """The layers of one side that are stacked, with their items on the other side by index.

    A layer is stacked if each of its leaves belongs to several leaves of the other side, and the
    paths of these differ only in one number that counts from 0. A pair is the path of a leaf and
    that of a leaf of the other side that shares its values.
    """
    of_leaf: dict[LayerPath, list[int]] = {}
    for number, (path, _) in enumerate(pairs):
        of_leaf.setdefault(path, []).append(number)
    index: dict[int, int] = {}
    for numbers in of_leaf.values():
        index.update(zip(numbers, _indices([pairs[n][1] for n in numbers]), strict=False))
    if not index:
        return {}
    by_values, below = _by_values(pairs), _below(path for path, _ in pairs)
    stacks = {}
    for path in sorted(below, key=len, reverse=True):
        items: dict[int, set[int]] = {}
        for number in below[path]:
            items.setdefault(index.get(number, -1), set()).add(number)
        found = [by_values.get(frozenset(items[i]), []) for i in sorted(items)]
        if path and -1 not in items and all(found):
            stacks[path] = tuple(layers.pop(layers.index(max(layers, key=len))) for layers in found)
    return stacks


def _indices(paths: Sequence[LayerPath]) -> list[int]:
    """The numbers in which paths differ, empty if they differ in something else."""
    places = [set(parts) for parts in zip(*paths, strict=False)]
    varying = [place for place, parts in enumerate(places) if len(parts) > 1]
    if len(varying) != 1 or len({len(path) for path in paths}) != 1:
        return []
    found = [re.fullmatch(r"(.*?)(\d+)", path[varying[0]]) for path in paths]
    if any(match is None for match in found):
        return []
    names, numbers = zip(*(match.groups() for match in found if match), strict=True)
    indices = [int(number) for number in numbers]
    return indices if len(set(names)) == 1 and sorted(indices) == list(range(len(paths))) else []


def _by_values(
    pairs: Sequence[tuple[LayerPath, LayerPath]],
) -> dict[frozenset[int], list[LayerPath]]:
    """The layers of the other side by the pairs that are below them."""
    by_values: dict[frozenset[int], list[LayerPath]] = {}
    for path, numbers in _below(path for _, path in pairs).items():
        by_values.setdefault(frozenset(numbers), []).append(path)
    return by_values


def _below(paths: Iterable[Path]) -> dict[LayerPath, set[int]]:
    below: dict[LayerPath, set[int]] = {}
    for number, path in enumerate(paths):
        for length in range(len(path)):
            below.setdefault(path[:length], set()).add(number)
    return below
