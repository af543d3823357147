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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._fields import FieldDifference, dropout_rate, field_differences
from ._layouts import Layouts, paired
from ._numbers import Compared, nan_count, worst
from ._recorder import LayerCall, Trace

_NO_LAYER = "no such layer"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A layer with outputs further apart than its inputs explain.

    Attributes:
      place: the layer's path in `a`; if the path in `b` differs, it follows behind an arrow. If
        the layer was called before, the number of the call follows, from 0.
      path: the layer's path in `a`.
      path_in_b: the layer's path in `b`.
      call: which call of it, from 0.
      modules: the layer's class in `a` and in `b`.
      inputs: the worst of its inputs, None if it has none that can be compared.
      output: the worst of its outputs.
      after: the last call before it with an output that agrees, empty if there is none.
      before: the first call inside it, or before it, whose inputs differ; empty if there is
        none. Then the fault is in what is done between `after` and `before`.
      leaves_tolerance: the first call that is out of tolerance, if this one still is within.
      fields: the static fields that differ between the two layers.
      dropout_rate: the layer's dropout rate, the larger one of both models; 0 if it has none.
    """

    place: str
    path: tuple[str, ...]
    path_in_b: tuple[str, ...]
    call: int
    modules: tuple[str, str]
    inputs: Compared | None
    output: Compared
    after: str = ""
    before: str = ""
    leaves_tolerance: str = ""
    fields: tuple[FieldDifference, ...] = ()
    dropout_rate: float = 0.0

    @property
    def inputs_agree(self) -> bool:
        """Whether the difference arises in this layer and not before it."""
        return self.inputs is None or self.inputs.ok


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of two models side by side.

    Attributes:
      compared: the worst output of every call that both models make, in execution order.
      first: the call at fault: the first whose output differs though its inputs agree, or one
        before it that explains this.
      inexact: the first call with bitwise equal inputs and an output that agrees only within
        tolerance. If some of these calls differ in fields, the first of those, which explains more.
      nan_from: the first call with a NaN in both outputs and none in its inputs, empty if there is
        none.
      fields: which static fields differ, by the place of every layer that both models have, and of
        every layer with a dropout rate that one model lacks.
      only: the places of the calls without a counterpart, of `a` and of `b`.
      not_comparable: how many calls get and return arrays of other shapes.
    """

    compared: tuple[Compared, ...]
    first: Divergence | None
    inexact: Divergence | None
    nan_from: str
    fields: Mapping[str, tuple[FieldDifference, ...]]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    not_comparable: int


def compare_layers(
    traces: Sequence[Trace], layouts: Layouts, measure: Callable[..., Compared]
) -> Layers:
    """Compares what the layers of two models did.

    `traces` are those of the reference and of the other model. `measure` is `compare` with the
    tolerances of the check.
    """
    pairs, only_a, only_b = paired(traces[0], traces[1], layouts)
    calls: list[Divergence] = []
    fields: dict[str, tuple[FieldDifference, ...]] = {}
    nan_from, not_comparable = "", 0
    for x, y in pairs:
        own, layer = _fields_of(x, y), _layer(x, y)
        fields[layer] = tuple(dict.fromkeys((*fields.get(layer, ()), *own)))
        place = _place(x, y)
        inputs, output = _worst(place, x, y, measure)
        if output is None:
            not_comparable += bool(x.outputs or y.outputs)
            continue
        calls.append(
            Divergence(
                place,
                x.path,
                y.path,
                x.nth,
                (x.module, y.module),
                inputs,
                output,
                fields=own,
                dropout_rate=max(dropout_rate(call.fields)[1] for call in (x, y)),
            )
        )
        if not nan_from and all(map(_has_nan, (x.outputs, y.outputs))) and not _has_nan(x.inputs):
            nan_from = place
    return Layers(
        tuple(call.output for call in calls),
        _first(calls),
        _inexact(calls),
        nan_from,
        {**fields, **_dropouts_only(only_a, only_b)},
        (
            tuple(_only(only_a, {x.path for x, _ in pairs})),
            tuple(_only(only_b, {y.path for _, y in pairs})),
        ),
        not_comparable,
    )


def _first(calls: Sequence[Divergence]) -> Divergence | None:
    """The call at fault, None if all are within tolerance."""
    wrong = [number for number, call in enumerate(calls) if not call.output.ok]
    if not wrong:
        return None
    # A call ends after those inside it. So the first one with equal inputs and another output is
    # the innermost: the layer at fault, or the layer around it if all layers in it agree.
    last = next((number for number in wrong if calls[number].inputs_agree), None)
    fault = wrong[0]
    if last is not None:
        growths = _growths(calls[: last + 1])
        fault = growths.index(max(growths))
    call, end = calls[fault], min(fault, wrong[0])
    after = calls[end - 1].place if end else ""
    if last is not None and call.output.ok:
        return dataclasses.replace(call, after=after, leaves_tolerance=calls[last].place)
    others = [before.place for before in calls[:last] if not before.inputs_agree]
    return dataclasses.replace(call, after=after, before=others[0] if others else "")


def _growths(calls: Iterable[Divergence]) -> list[float]:
    """How many times further apart the output of each call is than what goes into it.

    What goes into a layer is its inputs, what the layers in it return, and rounding.
    """
    growths: list[float] = []
    inside: dict[tuple[str, ...], float] = {}
    for call in calls:
        found, most = call.output.max_rel, sys.float_info.max
        # Another shape or dtype is further than any distance.
        is_other = found is None or (not call.output.ok and len({*call.output.dtypes}) > 1)
        apart = most if is_other else min(found or 0.0, most)
        given = (call.inputs and call.inputs.max_rel) or 0.0
        names = [name for name in call.output.dtypes if name and jnp.issubdtype(name, jnp.inexact)]
        rounding = [float(jnp.finfo(name).eps) for name in names]
        explained = max(given, inside.get(call.path, 0.0), sys.float_info.min, *rounding)
        growths.append(apart / explained if call.inputs_agree else 0.0)
        if call.inputs_agree and call.output.ok:
            for length in range(len(call.path)):
                above = call.path[:length]
                inside[above] = max(apart, inside.get(above, 0.0))
    return growths


def _inexact(calls: Sequence[Divergence]) -> Divergence | None:
    """`Layers.inexact`."""
    found = [
        call
        for call in calls
        if call.output.verdict == "close"
        and (call.inputs is None or call.inputs.verdict == "bitwise")
    ]
    return next((call for call in found if call.fields), found[0] if found else None)


def _fields_of(x: LayerCall, y: LayerCall) -> tuple[FieldDifference, ...]:
    dtypes = [[str(v.dtype) for v in call.outputs.values()] for call in (x, y)]
    same_dtypes = dtypes[0] == dtypes[1]
    fields = field_differences((x.layer, y.layer), x.fields, y.fields, same_dtypes=same_dtypes)
    return tuple(fields)


def _worst(
    place: str,
    x: LayerCall,
    y: LayerCall,
    measure: Callable[..., Compared],
) -> tuple[Compared | None, Compared | None]:
    """The worst of the inputs and of the outputs of two calls, None if nothing is comparable."""
    found = []
    for a, b in ((x.inputs, y.inputs), (x.outputs, y.outputs)):
        names = [(name, name) for name in a if name in b]
        # In order if no names are the same.
        pairs = [(a[m], b[n]) for m, n in names or zip(a, b, strict=False)]
        found.append([measure(place, _as(m, n), n) for m, n in pairs])
    inputs, outputs = found
    of_one_shape = [c for c in inputs if c.is_of_one_shape]
    if len(of_one_shape) < len(inputs):
        # What comes in reshaped may go out reshaped, and be the same for all that.
        outputs = [c for c in outputs if c.is_of_one_shape]
    return worst(of_one_shape or inputs), worst(outputs)


def _as(a: Any, b: Any) -> Any:
    """An array in the shape of another one if that splits or joins axes, as `DenseGeneral` does."""
    ends = [{int(n) for n in np.cumprod(array.shape)} for array in (a, b)]
    is_refined = ends[0] <= ends[1] or ends[1] <= ends[0]
    return a.reshape(b.shape) if a.size == b.size and is_refined else a


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
            name, rate = dropout_rate(call.fields)
            if call.is_leaf and rate:
                sides = (str(rate), _NO_LAYER) if is_in_a else (_NO_LAYER, str(rate))
                found["/".join(call.path)] = (FieldDifference(name, *sides),)
    return found


def _place(a: LayerCall, b: LayerCall) -> str:
    where = _text(a) if a.path == b.path else f"{_text(a)} -> {_text(b)}"
    return f"{where}, call {a.nth}" if a.nth else where


def _layer(a: LayerCall, b: LayerCall) -> str:
    """The layer of two calls, whatever the method."""
    own, other = ("/".join(call.path) or "the model itself" for call in (a, b))
    return own if own == other else f"{own} -> {other}"


def _text(call: LayerCall) -> str:
    method = "" if call.method == "__call__" else f".{call.method}"
    return ("/".join(call.path) or "the model itself") + method


def _has_nan(values: Mapping[str, Any]) -> bool:
    return any(map(nan_count, values.values()))
