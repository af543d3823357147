"""Rules for arrays that one model lays out otherwise, where shapes and calls leave one way."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from bridge._conversion.neutral import Path
from bridge._rules.pieces import LeafShape, Region, part_shape, pieces_of, without_axis
from bridge._rules.rules import UNCHANGED, Form

from . import _reasons
from ._correspondence import PLAIN, Context, Correspondence, Pairing
from ._evidence import are_alike, pairs_by_name
from ._names import words_of
from ._reasons import Evidence
from ._rule_text import braced, nnx_rule
from ._structure import size
from ._traces import Traces
from ._trees import LinenNode, N, NNXNode

# What goes together, and in which form.
_Part: TypeAlias = tuple[list[LinenNode], list[NNXNode], Form]

# From the plainest to the least plain; a bias has one axis only.
_AXES = (-1, 0, -2, -3)
_FORMS = [
    Form(() if is_transposed else None, is_reshaped)
    for is_reshaped in (False, True)
    for is_transposed in (False, True)
]
# How many leaves one may be made of.
_MOST = 4
# The usual order of parts; each word stands for itself and its first letter.
_USUAL = ("query", "key", "value")
# How the label begins of what the user's rules put together.
_GIVEN = "rule "


class Refit(NamedTuple):
    """Modules or leaves that a rule puts together; one side may have several."""

    linen: tuple[LinenNode, ...]
    nnx: tuple[NNXNode, ...]
    form: Form
    evidence: Evidence
    context: Context = PLAIN

    @property
    def texts(self) -> tuple[str, str] | None:
        """The two sides as a rule writes them; None if their names are in several places."""
        axis = f"@{self.form.axis}" if self.form.axis != -1 else ""
        times = f"{self.form.times}x " if self.form.times > 1 else ""
        linen = braced([scope.text for scope in self.linen], "/", axis, times)
        nnx = braced([nnx_rule(node, self.context) for node in self.nnx], ".", axis, times)
        words = " transpose" * (self.form.axes is not None) + " reshape" * self.form.is_reshaped
        return (linen, nnx + words) if linen is not None and nnx is not None else None


def refits(found: Correspondence, traces: Traces) -> Iterator[Refit]:
    """What would put together leaves that have no place, or that one model uses transposed."""
    laid_out: set[Context] = set()
    for refit in (*_paired(found, traces), *_left_over(found, traces)):
        laid_out.add(refit.context)
        yield refit
    for layer in (layer for stack in found.stacks for layer in stack.layers):
        if layer.context in laid_out:
            yield Refit((layer.linen,), (layer.nnx,), UNCHANGED, layer.evidence, layer.context)


def _paired(found: Correspondence, traces: Traces) -> list[Refit]:
    """Leaves of one pair with other shapes, or of which one model uses the transpose."""
    leaves = [
        (each.linen[1], each.nnx, each.context, _reasons.EQUAL_NAMES_AND_SIZE)
        for each in found.mis_shaped
        if _GIVEN not in each.rule
    ]
    leaves += [
        (scope.path, node.path, PLAIN, _reasons.TRANSPOSED)
        for node, scope, label in found.same_leaves()
        if _GIVEN not in label and traces.is_transposed(node, scope)
    ]
    refitted: dict[tuple[LinenNode, NNXNode], Refit] = {}
    for path, own, context, evidence in leaves:
        # A rule for the kernel alone would leave the bias without one.
        for above in (1, 0):
            scope, node = (
                found.linen.at(path[: len(path) - above]),
                found.nnx.at(own[: len(own) - above]),
            )
            if not (scope and node and scope.path and node.path):
                continue
            is_layer = all(
                each.is_leaf for side in (scope, node) for each in side.children.values()
            )
            if is_layer and (form := _form([scope], [node], context, traces)):
                refitted[scope, node] = Refit((scope,), (node,), form, evidence, context)
                break
    return list(refitted.values())


def _left_over(found: Correspondence, traces: Traces) -> Iterator[Refit]:
    """Modules of which no leaf has a place, in each pair of modules."""
    places = [Pairing(found.linen, found.nnx, PLAIN, ""), *found.pairings]
    linen, nnx = found.linked
    scopes = _by_pair(found.linen, linen, {place.linen.path for place in places})
    nodes = _by_pair(found.nnx, nnx, {place.nnx.path for place in places})
    for place in places:
        if (own := nodes.get(place.nnx.path)) and (theirs := scopes.get(place.linen.path)):
            yield from _within(theirs, own, place, traces)


def _by_pair(root: N, linked: Container[Any], paired: Container[Path]) -> dict[Path, list[N]]:
    """The holders of leaves of which none is linked, by the innermost pair around them."""
    found: dict[Path, list[N]] = {}
    for node in _holders(root):
        if not any(key in linked for leaf in node.weights.values() for key in leaf.arrays):
            lengths = range(max(len(node.path) - 1, 0), -1, -1)
            around = next(node.path[:n] for n in lengths if node.path[:n] in paired)
            found.setdefault(around, []).append(node)
    return found


def _within(
    scopes: list[LinenNode], nodes: list[NNXNode], place: Pairing, traces: Traces
) -> Iterator[Refit]:
    """What fits of the modules that lie in two modules that are the same."""
    context = place.context
    forms = {
        (node, scope): _form([scope], [node], context, traces)
        for node, scope in pairs_by_name(place, nodes, scopes)
        if are_alike(node, scope)
    }
    named = [pair for pair, form in forms.items() if form]
    if named and not traces.contradicts(named):
        for node, scope in named:
            if (form := forms[node, scope]) and form != UNCHANGED:
                yield Refit((scope,), (node,), form, _reasons.NAMES_AND_SIZE, context)
        taken = {each for pair in named for each in pair}
        nodes = [node for node in nodes if node not in taken]
        scopes = [scope for scope in scopes if scope not in taken]
    called, own_called = traces.in_order(scopes), traces.in_order(nodes)
    if not called or not own_called:
        return
    found = _only_way(called, own_called, context, traces)
    if all(form == UNCHANGED for *_, form in found):
        return
    pairs = [(ours[0], theirs[0]) for theirs, ours, _ in found if len(ours) == len(theirs)]
    told = dict(zip(pairs, traces.told(pairs), strict=True))
    for theirs, ours, form in found:
        evidence = _evidence(
            theirs, ours, context, traces, is_told=told.get((ours[0], theirs[0]), True)
        )
        yield Refit(tuple(theirs), tuple(ours), form, evidence, context)


def _only_way(
    scopes: list[LinenNode], nodes: list[NNXNode], context: Context, traces: Traces
) -> list[_Part]:
    """The scopes and nodes that go together, in order, if there is one way only."""

    @functools.cache
    def ways(i: int, j: int) -> list[list[_Part]]:
        if i == len(scopes) and j == len(nodes):
            return [[]]
        found: list[list[_Part]] = []
        for a, b in _STEPS:
            theirs, ours = scopes[i : i + a], nodes[j : j + b]
            if (len(theirs), len(ours)) != (a, b):
                continue
            if form := _form(theirs, ours, context, traces):
                found += [[(theirs, ours, form), *rest] for rest in ways(i + a, j + b)]
        return found[:2]

    found = ways(0, 0) if len(scopes) + len(nodes) < 400 else []
    return found[0] if len(found) == 1 else []


def _evidence(
    scopes: Sequence[LinenNode],
    nodes: Sequence[NNXNode],
    context: Context,
    traces: Traces,
    *,
    is_told: bool,
) -> Evidence:
    any_order = _reasons.ANY_ORDER
    if len(scopes) == len(nodes) == 1:
        is_told = is_told or are_alike(nodes[0], scopes[0])
        return _reasons.CALLS_AND_SIZE if is_told else _reasons.CALLS_AND_SIZE & any_order
    if _times(scopes, nodes, context, traces) != [1]:
        return _reasons.CALLS_AND_SIZES & _reasons.IN_BLOCKS
    parts = [each.name for each in (nodes if len(nodes) > 1 else scopes)]
    return _reasons.CALLS_AND_SIZES & (_reasons.USUAL_ORDER if _are_usual(parts) else any_order)


def _form(
    scopes: Sequence[LinenNode], nodes: Sequence[NNXNode], context: Context, traces: Traces
) -> Form | None:
    """The plainest form in which all leaves fit, None if there is none."""
    fused = None if len(scopes) == len(nodes) else "linen" if len(nodes) > 1 else "nnx"
    if fused and len({each.path[:-1] for each in (nodes if fused == "linen" else scopes)}) > 1:
        return None
    ours, theirs = [n.weights for n in nodes], [s.weights for s in scopes]
    names = ours[0].keys()
    if any(each.keys() != names for each in (*ours, *theirs)):
        return None
    count = max(len(scopes), len(nodes))
    layers: list[tuple[list[_Layer], list[_Layer]]] = [
        (
            [_layer(each[name], context, traces) for each in theirs] * (count // len(theirs)),
            [_layer(each[name], context, traces) for each in ours] * (count // len(ours)),
        )
        for name in names
    ]
    times = _times(scopes, nodes, context, traces)[0] if fused else 1
    for form in _FORMS:
        for axis in _AXES if fused else (-1,):
            tried = form._replace(fused=fused, axis=axis, times=times)
            if all(_fits(*each, tried) for each in layers):
                return tried
    return None


def _times(
    scopes: Sequence[LinenNode], nodes: Sequence[NNXNode], context: Context, traces: Traces
) -> list[int]:
    """How often parts may lie in what one side has as one, as its use shows; else once."""
    theirs, ours = [s.weights for s in scopes], [n.weights for n in nodes]
    whole, parts = (theirs[0], ours) if len(nodes) > len(scopes) else (ours[0], theirs)
    found: list[int] = []
    for name, leaf in whole.items():
        sizes = traces.product(leaf)
        elements, total = size(leaf, context), math.prod(sizes)
        if not sizes or not elements or not total or elements % total:
            continue
        own = [(size(part[name], context) or 0) * total // elements for part in parts]
        for axis, times in ((0, 1), (1, sizes[0])):
            block = times * math.prod(sizes[axis + 1 :])
            if not any(n % block for n in own) and sum(own) == block * sizes[axis]:
                found.append(times)
    return list(dict.fromkeys(found)) or [1]


_STEPS = [
    (1, 1),
    *((1, n) for n in range(2, _MOST + 1)),
    *((n, 1) for n in range(2, _MOST + 1)),
]


def _holders(root: Any) -> Iterator[Any]:
    """The nodes with leaves of their own, below a root or itself its leaves."""
    for node in root.walk():
        leaves = node.weights
        if "" not in leaves and leaves:
            # No rule can name the model itself.
            yield from [node] if node.path else leaves.values()


class _Layer(NamedTuple):
    """The shape of a leaf or of one layer of it, and what the model does along each axis."""

    shape: LeafShape
    uses: tuple[str, ...] | None


def _layer(leaf: NNXNode | LinenNode, context: Context, traces: Traces) -> _Layer:
    layer = context.of(leaf)
    shape, uses = leaf.rows[0].shape, traces.along_axes(leaf)
    if uses is not None and layer is not None and -len(uses) <= layer.axis < len(uses):
        uses = _without(uses, {layer.axis % len(uses)})
    return _Layer(without_axis(shape, layer), uses)


def _without(items: Sequence[str], axes: Container[int]) -> tuple[str, ...]:
    return tuple(item for axis, item in enumerate(items) if axis not in axes)


def _fits(linen: Sequence[_Layer], nnx: Sequence[_Layer], form: Form) -> bool:
    pieces = pieces_of([each.shape for each in linen], [e.shape for e in nnx], (None, None), form)
    if isinstance(pieces, str):
        return False
    for piece, theirs, ours in zip(pieces, linen, nnx, strict=True):
        a, b = _part(theirs, piece.linen_region), _part(ours, piece.nnx_region)
        order = range(len(a.shape or ())) if piece.axes is None else piece.axes
        moved = tuple((a.shape or ())[axis] for axis in order)
        uses = a.uses and tuple(a.uses[axis] for axis in order)
        ends = [[*itertools.accumulate(shape, operator.mul)] for shape in (moved, b.shape or ())]
        # An order of elements is told where axes are only joined or taken apart.
        is_told = {*ends[0]} <= {*ends[1]} or {*ends[1]} <= {*ends[0]}
        is_vector = math.prod(moved) == max((*moved, *(b.shape or ())), default=1)
        if form.is_reshaped and not form.fused and not (is_told or is_vector):
            return False
        if uses and b.uses and not _are_used_alike(ends, (uses, b.uses)):
            return False
    return True


def _part(layer: _Layer, region: Region) -> _Layer:
    gone = {cut.axis for cut in region if cut.is_index}
    return _Layer(part_shape(layer.shape or (), region), layer.uses and _without(layer.uses, gone))


def _are_used_alike(
    ends: Sequence[Sequence[int]], uses: tuple[tuple[str, ...], tuple[str, ...]]
) -> bool:
    """Whether axes mean the same; one side may have several of them as one.

    For each axis of either side, `ends` has how many elements it makes with those before it.
    """
    known = {"sum", "layers"} if all("layers" in own for own in uses) else {"sum"}
    for end in {*ends[0], *ends[1]} - {1}:
        (one, *_), (other, *_) = (
            [use for last, use in zip(*side, strict=True) if last >= end]
            for side in zip(ends, uses, strict=True)
        )
        if one != other and known & {one, other}:
            return False
    return True


def _are_usual(names: Sequence[str]) -> bool:
    """Whether the names of parts say query, key and value, in this order."""
    words = [words_of(name) for name in names]
    return len(names) == len(_USUAL) and all(
        any(usual.startswith(word) for word in own)
        for usual, own in zip(_USUAL, words, strict=True)
    )
