"""The first layer, in execution order, that does something else than its counterpart.

A small fault, such as another epsilon, may stay within tolerance in its own layer and leave it in a
later one. So each call is measured by its growth: how many times further apart its outputs are than
what goes into it. Of the calls up to the first one out of tolerance, that of the largest growth is
at fault.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from ._captured import LayerCall, Trace
from ._dropout import rate_of
from ._fields import FieldDifference, field_differences
from ._layouts import Layouts
from ._numbers import Compared, Tolerance, compare, has_nan, worst
from ._pairs import paired

_NO_LAYER = "no such layer"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A layer with outputs further apart than its inputs explain.

    Attributes:
      place: the layer's path in `a`; if the path in `b` differs, it follows behind an arrow. If
        the layer is called several times, the number of the call follows, from 0.
      path: the layer's path in `a`. An item of a stacked layer has its index in it if the other
        model has the items one by one.
      path_in_b: the layer's path in `b`.
      call: which call of it, from 0.
      modules: the layer's class in `a` and in `b`.
      position: which of the compared calls it is in the order of execution, from 0.
      inputs: the worst of its inputs, None if it has none that can be compared.
      output: the worst of its outputs.
      after: the last call before it with an output that agrees, empty if there is none.
      before: the first call inside it, or before it, whose inputs differ; empty if there is
        none. Then the fault is in what is done between `after` and `before`.
      leaves_tolerance: the first call that is out of tolerance, if this one still is within.
      fields: the static fields that differ between the two layers.
      drops: whether dropout is on in the layer, in `a` and in `b`.
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
    before: str = ""
    leaves_tolerance: str = ""
    fields: tuple[FieldDifference, ...] = ()
    drops: tuple[bool, bool] = (False, False)

    @property
    def inputs_agree(self) -> bool:
        """Whether the difference arises in this layer and not before it."""
        return self.inputs is None or self.inputs.ok


class Layers:
    """The layers of two models side by side.

    A call ends after those inside it. So the first one with equal inputs and another output is
    the innermost: the layer at fault, or the layer around it if all layers in it agree.

    Args:
      traces: what the reference did, and what the other model did.
      layouts: how their paths correspond.
      table: tolerances by dtype name.
      dtypes: whether another dtype is a difference.

    Attributes:
      compared: the worst output of every call that both models make, in execution order.
      first: the call at fault: the first whose output differs though its inputs agree, or one
        before it that explains this.
      nan_from: the first call with a NaN in both outputs and none in its inputs, empty if there is
        none.
      fields: which static fields differ, by the place of every layer that both models have, and of
        every layer with a dropout rate that one model lacks.
      only: the places of the calls without a counterpart, of `a` and of `b`.
      not_comparable: how many calls get and return arrays of other shapes.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        layouts: Layouts,
        table: Mapping[str, Tolerance],
        *,
        dtypes: bool,
    ):
        self.compared: list[Compared] = []
        self.first: Divergence | None = None
        self.nan_from = ""
        self.fields: dict[str, tuple[FieldDifference, ...]] = {}
        self.not_comparable = 0
        self._inexact: list[Divergence] = []
        # The call of the largest growth so far, and the largest distance within each layer.
        self._origin: tuple[float, Divergence] | None = None
        self._inside: dict[tuple[str, ...], float] = {}
        self._after = self._before = ""
        self._table, self._dtypes, self._reshaped = table, dtypes, layouts.reshaped
        found = paired(traces[0], traces[1], layouts)
        self._several = _several([x for x, _ in found.pairs])
        for x, y in found.pairs:
            self._add(x, y)
        if self.first is not None and not self.first.output.ok:
            self.first = dataclasses.replace(self.first, before=self._before)
        self.fields |= _dropouts_only(found.only_a, found.only_b)
        self.only = [
            list(_only(found.only_a, {x.path for x, _ in found.pairs})),
            list(_only(found.only_b, {y.path for _, y in found.pairs})),
        ]

    @property
    def inexact(self) -> Divergence | None:
        """The first call with bitwise equal inputs and an output that agrees only within tolerance.

        If some of these calls also differ in fields, the first of those, which explains more.
        """
        first = self._inexact[0] if self._inexact else None
        return next((found for found in self._inexact if found.fields), first)

    def _add(self, x: LayerCall, y: LayerCall) -> None:
        """Compares two calls that are counterparts."""
        place = _place(x, y, (x.path, x.method) in self._several)
        fields = self._fields_of(x, y)
        sides = [(x.outputs, y.outputs), (x.inputs, y.inputs)]
        if x.path in self._reshaped:
            sides = [(_in_shapes_of(own, other), other) for own, other in sides]
        leaves, given = self._leaves(place, *sides[0]), self._leaves("", *sides[1])
        of_one_shape = [c for c in given if c.is_of_one_shape]
        if len(of_one_shape) < len(given):
            # What comes in reshaped may go out reshaped, and be the same for all that.
            leaves = [c for c in leaves if c.is_of_one_shape]
        output, inputs = worst(leaves), worst(of_one_shape or given)
        inputs_agree = inputs is None or inputs.ok
        if not inputs_agree and not self._before and not self._is_settled():
            # The first call with different inputs shows where a fault lies.
            self._before = place
        if output is None:
            self.not_comparable += bool(x.outputs or y.outputs)
            return
        found = Divergence(
            place, x.path, y.path, x.nth, (x.module, y.module), len(self.compared), inputs, output,
            self._after, fields=fields, drops=(x.drops, y.drops),
        )  # fmt: skip
        agrees = output.ok
        if output.verdict != "bitwise" and inputs_agree:
            self._note_growth(found, agrees)
        if not agrees and not self._is_settled():
            # If there is no better one, report the first.
            self.first = found if self.first is None or found.inputs_agree else self.first
            if self.first.inputs_agree and self._origin and self._origin[1] is not self.first:
                self.first = dataclasses.replace(self._origin[1], leaves_tolerance=place)
        elif agrees and self.first is None:
            self._after = place
        if output.verdict == "close" and (inputs is None or inputs.verdict == "bitwise"):
            self._inexact.append(found)
        if not self.nan_from and _has_nan(x.outputs, y.outputs) and not _has_nan(x.inputs):
            self.nan_from = place
        self.compared.append(output)

    def _note_growth(self, call: Divergence, agrees: bool) -> None:
        """Remembers the call whose output is the most times further apart than what goes into it.

        What goes into a layer is its inputs, what the layers in it return, and rounding.
        """
        found, most = call.output.max_rel, sys.float_info.max
        # Another shape or dtype is further than any distance.
        is_other = found is None or (not agrees and len({*call.output.dtypes}) > 1)
        apart = most if is_other else min(found or 0.0, most)
        given = (call.inputs and call.inputs.max_rel) or 0.0
        names = [name for name in call.output.dtypes if name and jnp.issubdtype(name, jnp.inexact)]
        rounding = [float(jnp.finfo(name).eps) for name in names]
        inside = self._inside.get(call.path, 0.0)
        growth = apart / max(given, inside, sys.float_info.min, *rounding)
        if self._origin is None or growth > self._origin[0]:
            self._origin = growth, call
        if agrees:
            for length in range(len(call.path)):
                above = call.path[:length]
                self._inside[above] = max(apart, self._inside.get(above, 0.0))

    def _is_settled(self) -> bool:
        return self.first is not None and self.first.inputs_agree

    def _fields_of(self, x: LayerCall, y: LayerCall) -> tuple[FieldDifference, ...]:
        dtypes = [[str(v.dtype) for v in call.outputs.values()] for call in (x, y)]
        same_dtypes = dtypes[0] == dtypes[1]
        fields = field_differences((x.layer, y.layer), x.fields, y.fields, same_dtypes=same_dtypes)
        found = tuple(fields)
        place = _layer(x, y)
        known = self.fields.get(place, ())
        self.fields[place] = (*known, *(d for d in found if d not in known))
        return found

    def _leaves(self, place: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Compared]:
        """The arrays of two calls: of one name, or in order if no names are the same."""
        names = [(name, name) for name in a if name in b]
        if not names:
            names = list(zip(a, b, strict=False))
        return [compare(place, a[x], b[y], self._table, dtypes=self._dtypes) for x, y in names]


def _in_shapes_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a call, reshaped as those of another that are as large."""
    return {
        name: own.reshape(other.shape) if own.size == other.size else own
        for (name, own), other in zip(a.items(), b.values(), strict=False)
    }


def _several(calls: Iterable[LayerCall]) -> Set[Any]:
    """The layers and methods that are called more than once."""
    counts = collections.Counter((call.path, call.method) for call in calls)
    return {key for key, count in counts.items() if count > 1}


def _only(calls: Iterable[LayerCall], with_counterpart: Set[tuple[str, ...]]) -> Iterator[str]:
    """The layers of calls without a counterpart, each once.

    Linen does not show all methods besides `__call__`: that of an RNN cell which makes its carry is
    seen in NNX alone. So these count only where the whole layer has no counterpart.
    """
    counts = collections.Counter(
        (_text(call), call.module)
        for call in calls
        if call.method == "__call__" or call.path not in with_counterpart
    )
    for (text, module), count in counts.items():
        yield f"{text} ({module})" + (f", {count} calls" if count > 1 else "")


def _dropouts_only(
    only_a: Iterable[LayerCall], only_b: Iterable[LayerCall]
) -> dict[str, tuple[FieldDifference, ...]]:
    """The layers with a dropout rate that one model lacks: no output shows it in an evaluation."""
    found: dict[str, tuple[FieldDifference, ...]] = {}
    for calls, is_in_a in ((only_a, True), (only_b, False)):
        for call in calls:
            name, rate = rate_of(call.fields)
            if call.is_leaf and rate:
                sides = (str(rate), _NO_LAYER) if is_in_a else (_NO_LAYER, str(rate))
                found["/".join(call.path)] = (FieldDifference(name, *sides),)
    return found


def _place(a: LayerCall, b: LayerCall, is_one_of_several: bool) -> str:
    where = _text(a) if a.path == b.path else f"{_text(a)} -> {_text(b)}"
    return f"{where}, call {a.nth}" if is_one_of_several else where


def _layer(a: LayerCall, b: LayerCall) -> str:
    """The layer of two calls, whatever the method."""
    own, other = ("/".join(call.path) or "the model itself" for call in (a, b))
    return own if own == other else f"{own} -> {other}"


def _text(call: LayerCall) -> str:
    method = "" if call.method == "__call__" else f".{call.method}"
    return ("/".join(call.path) or "the model itself") + method


def _has_nan(*sides: Mapping[str, Any]) -> bool:
    """Whether every one of these has a NaN somewhere."""
    return all(any(has_nan(value) for value in values.values()) for values in sides)
