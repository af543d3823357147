"""The first layer, in execution order, that does something else than its counterpart."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ._layouts import Layouts
from ._numbers import Compared, Tolerance, compare, worst
from ._trace import Call, Trace


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A layer whose output differs.

    Attributes:
      place: the layer in `a`; if it is elsewhere in `b`, that stands behind an arrow. Behind a
        comma which call it is, from 0, if there are several.
      path: the layer's path in `a`.
      path_in_b: the layer's path in `b`.
      call: which call of it, from 0.
      modules: the layer's class in `a` and in `b`.
      position: which of the compared calls it is in the order of execution, from 0.
      inputs: the worst of its inputs, None if it has none that can be compared.
      output: the worst of its outputs.
      after: the last call before it whose output agrees, empty if there is none.
    """

    place: str
    path: tuple[str, ...]
    path_in_b: tuple[str, ...]
    call: int
    modules: tuple[str, str]
    position: int
    inputs: Compared | None
    output: Compared
    after: str

    @property
    def inputs_agree(self) -> bool:
        """Whether the difference arises here, and does not come in."""
        return self.inputs is None or self.inputs.ok


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of two models side by side.

    Attributes:
      compared: the worst output of every call that both models make, in execution order.
      first: the first call whose output differs though its inputs agree.
      unmatched: how many calls of `a` and of `b` have no counterpart.
      not_comparable: how many calls return arrays of other shapes.
    """

    compared: tuple[Compared, ...]
    first: Divergence | None
    unmatched: tuple[int, int]
    not_comparable: int


def compare_layers(a: Trace, b: Trace, layouts: Layouts, table: Mapping[str, Tolerance]) -> Layers:
    """Compares what the layers of two models returned.

    A call ends after those inside of it. So the first one whose inputs agree and whose output
    differs is the innermost: a layer at fault, or the one around it if all layers in it agree.
    """
    pairs = list(_pairs(a, b, layouts))
    compared: list[Compared] = []
    first: Divergence | None = None
    after, not_comparable = "", 0
    calls = _calls(a)
    for x, y in pairs:
        place = _place(x, y, calls[x.path, x.method])
        output = worst(_leaves(place, x.outputs, y.outputs, table))
        if output is None:
            not_comparable += bool(x.outputs or y.outputs)
            continue
        if not output.ok and (first is None or not first.inputs_agree):
            inputs = worst(_leaves("", x.inputs, y.inputs, table))
            found = Divergence(
                place,
                x.path,
                y.path,
                x.nth,
                (x.module, y.module),
                len(compared),
                inputs,
                output,
                after,
            )
            # If nothing better comes, the first one at all is told.
            first = found if first is None or found.inputs_agree else first
        elif output.ok and first is None:
            after = place
        compared.append(output)
    unmatched = len(a.calls) - len(pairs), len(b.calls) - len(pairs)
    return Layers(tuple(compared), first, unmatched, not_comparable)


def _pairs(a: Trace, b: Trace, layouts: Layouts) -> Iterator[tuple[Call, Call]]:
    """The calls that are counterparts, in `a`'s order."""
    in_b = {(call.path, call.method, call.nth): call for call in b.calls}
    found: dict[int, Call] = {}
    for number, call in enumerate(a.calls):
        path = layouts.path_in_b(call.path)
        key = None if path is None else (path, call.method, call.nth)
        if key in in_b:
            found[number] = in_b.pop(key)
    # Layers that are stacked on one side only have no path in common, but an order.
    rest_a = [n for n, call in enumerate(a.calls) if n not in found and call.is_leaf]
    left = {id(call) for call in in_b.values()}
    rest_b = [call for call in b.calls if id(call) in left and call.is_leaf]
    if [_shapes(a.calls[n]) for n in rest_a] == [_shapes(call) for call in rest_b]:
        found.update(zip(rest_a, rest_b, strict=True))
    for number in sorted(found):
        yield a.calls[number], found[number]


def _leaves(
    place: str, a: Mapping[str, Any], b: Mapping[str, Any], table: Mapping[str, Tolerance]
) -> list[Compared]:
    """The arrays of two calls: of one name, or in order if no names are the same."""
    names = [(name, name) for name in a if name in b]
    if not names:
        names = list(zip(a, b, strict=False))
    return [
        compare(place, a[x], b[y], table, dtypes=False)
        for x, y in names
        if a[x].shape == b[y].shape
    ]


def _calls(trace: Trace) -> Mapping[Any, int]:
    return collections.Counter((call.path, call.method) for call in trace.calls)


def _place(a: Call, b: Call, calls: int) -> str:
    def text(call: Call) -> str:
        method = "" if call.method == "__call__" else f".{call.method}"
        return ("/".join(call.path) or "the model itself") + method

    where = text(a) if a.path == b.path else f"{text(a)} -> {text(b)}"
    return f"{where}, call {a.nth}" if calls > 1 else where


def _shapes(call: Call) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in call.outputs.values()]
