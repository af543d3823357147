"""Pairs parts of Linen and NNX leaves, and moves values along them.

A `Piece` says that a region of one leaf is a region of another, perhaps transposed or reshaped. A
fused kernel has a piece for each part, a stacked layer one for each entry, an ordinary leaf one
that is the whole of both. Every layer is described by its pieces once, and both directions read the
same ones, so each is the inverse of the other by construction. Values are only moved around:
gradients and Adam's moments move in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .rules import Form, Layer


class Cut(NamedTuple):
    """An interval of one axis, or of each of several equal blocks of it.

    Attributes:
      axis: counted from the front, in the whole leaf.
      start: the first index.
      size: how many.
      is_index: whether the axis is gone from the part, which then has `size` 1.
      times: of how many blocks; the part has those intervals one after the other.
    """

    axis: int
    start: int
    size: int
    is_index: bool = False
    times: int = 1


Region: TypeAlias = tuple[Cut, ...]
LeafShape: TypeAlias = tuple[int, ...] | None
WHOLE: Region = ()


class Piece(NamedTuple):
    """A region of a Linen leaf and the region of an NNX leaf that holds the same values.

    Attributes:
      linen: the Linen leaf.
      nnx: the NNX leaf, None for what only Linen has and what must be zero there.
      linen_region: which part of the Linen leaf.
      nnx_region: which part of the NNX leaf.
      axes: for each axis of the NNX part before it is reshaped, which axis of the Linen part it is;
        None for the same order.
      rule: what put the two together, for the report.
      layers: which of several stacked layers of the Linen and of the NNX leaf this is.
    """

    linen: Any
    nnx: Any
    linen_region: Region = WHOLE
    nnx_region: Region = WHOLE
    axes: tuple[int, ...] | None = None
    rule: str = ""
    layers: tuple[Layer | None, Layer | None] = (None, None)

    def to_nnx(self, value: Any, shape: Sequence[int]) -> Any:
        """The NNX part, of a shape, that a Linen part is."""
        return (value if self.axes is None else value.transpose(self.axes)).reshape(shape)

    def to_linen(self, value: Any, shape: Sequence[int]) -> Any:
        """The Linen part, of a shape, that an NNX part is; the inverse of `to_nnx`."""
        if self.axes is None:
            return value.reshape(shape)
        value = value.reshape([shape[axis] for axis in self.axes])
        return value.transpose([self.axes.index(axis) for axis in range(len(shape))])

    def moved(self, value: object, shape: Sequence[int], *, to_nnx: bool) -> tuple[Region, Any]:
        """The region of a target of some shape that the piece fills, and with what."""
        if to_nnx:
            here = part_shape(shape, self.nnx_region)
            return self.nnx_region, self.to_nnx(cut_out(value, self.linen_region), here)
        here = part_shape(shape, self.linen_region)
        return self.linen_region, self.to_linen(cut_out(value, self.nnx_region), here)


def part_shape(shape: Sequence[int], region: Region) -> tuple[int, ...]:
    """The shape of a part of a leaf."""
    cuts = {cut.axis: cut for cut in region}
    kept = [axis for axis in range(len(shape)) if axis not in cuts or not cuts[axis].is_index]
    return tuple(
        cuts[axis].size * cuts[axis].times if axis in cuts else shape[axis] for axis in kept
    )


def cut_out(value: Any, region: Region) -> Any:
    """The part of a leaf that a region says; the whole is the same object."""
    if not region:
        return value
    shape, inside = _in_blocks(value.shape, region)
    if inside != region:
        return cut_out(value.reshape(shape), inside).reshape(part_shape(value.shape, region))
    cuts = {cut.axis: cut for cut in region}
    found = [cuts.get(axis, Cut(axis, 0, size)) for axis, size in enumerate(value.shape)]
    gone = tuple(cut.axis for cut in region if cut.is_index)
    if isinstance(value, jax.Array):
        # The starts are arguments of the compiled program: one program for all parts of a size.
        starts = [cut.start for cut in found]
        return jax.lax.squeeze(jax.lax.dynamic_slice(value, starts, [c.size for c in found]), gone)
    return value[tuple(c.start if c.is_index else slice(c.start, c.start + c.size) for c in found)]


def assembled(parts: Sequence[tuple[Region, Any]]) -> Any:
    """The leaf that consists of these parts; the inverse of `cut_out` for all regions together.

    `parts` has (region, value); the regions cover the leaf, and no two of them overlap.
    """
    region, value = parts[0]
    if not region:
        return value
    whole = [(region, _whole_rank(value, region)) for region, value in parts]
    axis = next((cut.axis for cut in region if cut.times > 1), None)
    if axis is None:
        return _joined(whole)
    blocks: list[tuple[Region, Any]] = []
    for region, value in whole:
        shape, inside = _in_blocks(value.shape, region)
        blocks.append((inside, value.reshape(shape)))
    joined = _joined(blocks)
    return joined.reshape((*joined.shape[:axis], -1, *joined.shape[axis + 2 :]))


def covers(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether regions make up a whole leaf without overlapping.

    They have to be all that some cuts through the whole leaf make.
    """
    if len({tuple((cut.axis, cut.times) for cut in region) for region in regions}) != 1:
        return False
    total = 1
    for column in zip(*regions, strict=True):
        intervals = sorted({(cut.start, cut.size) for cut in column})
        ends = [0, *(start + size for start, size in intervals)]
        starts: list[int] = [
            *(start for start, _ in intervals),
            shape[column[0].axis] // column[0].times,
        ]
        if starts != ends:
            return False
        total *= len(intervals)
    return len(regions) == len(set(regions)) == total


def side_by_side(
    shape: Sequence[int], parts: Sequence[Sequence[int]], axis: int, times: int = 1
) -> list[Region]:
    """The regions of a leaf that hold parts side by side on an axis; none if they do not fit.

    A part may be reshaped; one of size 1 may lack the axis. The parts lie side by side `times`
    times.
    """
    if not -len(shape) <= axis < len(shape):
        return []
    axis %= len(shape)
    beside = math.prod(shape) // (shape[axis] or 1)
    sizes = [math.prod(part) // (beside or 1) for part in parts]
    if sum(sizes) != shape[axis] or sum(map(math.prod, parts)) != math.prod(shape):
        return []
    if any(size % times for size in sizes):
        return []
    starts = itertools.accumulate((size // times for size in sizes), initial=0)
    return [
        (Cut(axis, start, size // times, size == 1 and len(part) == len(shape) - 1, times),)
        for start, size, part in zip(starts, sizes, parts, strict=False)
    ]


def without_axis(shape: Sequence[int] | None, layer: Layer | None) -> Any:
    """The shape of one layer of a stacked leaf; an impossible one if there is no such layer."""
    if shape is None or layer is None:
        return shape
    if not -len(shape) <= layer.axis < len(shape):
        return (-1,)
    axis = layer.axis % len(shape)
    if layer.number >= shape[axis] or layer.total not in (None, shape[axis]):
        return (-1,)
    return (*shape[:axis], *shape[axis + 1 :])


def layer_cut(shape: tuple[int, ...] | None, layer: Layer | None) -> Region:
    """The part of a stacked leaf that is one layer."""
    if layer is None or not shape:
        return ()
    return (Cut(layer.axis % len(shape), layer.number, 1, is_index=True),)


def pieces_of(
    linen: Sequence[LeafShape],
    nnx: Sequence[LeafShape],
    layers: tuple[Layer | None, Layer | None],
    form: Form,
) -> list[Piece] | str:
    """How the leaves that a rule puts together are made of each other.

    `layers` says which of several stacked layers of the Linen and of the NNX leaves is meant.
    Returns a piece for each part, without leaves; or why there is none.
    """
    theirs = [without_axis(shape, layers[0]) for shape in linen]
    ours = [without_axis(shape, layers[1]) for shape in nnx]
    if None in (*theirs, *ours):
        return "not all of them are arrays"
    cuts: list[Region] = [()] * len(linen)
    if form.fused:
        fused, parts = (theirs[0], ours) if form.fused == "linen" else (ours[0], theirs)
        cuts = side_by_side(fused, parts, form.axis, form.times)
        if not cuts:
            text = " and ".join(map(str, dict.fromkeys(parts)))
            often = f" {form.times} times" if form.times > 1 else ""
            return f"{text} do not lie side by side in {fused} on axis {form.axis}{often}"
    pieces: list[Piece] = []
    for n, cut in enumerate(cuts):
        linen_cut, nnx_cut = (cut, ()) if form.fused == "linen" else ((), cut)
        there, here = part_shape(theirs[n], linen_cut), part_shape(ours[n], nnx_cut)
        axes = _axes(form, len(there))
        moved = there if axes is None else tuple(there[axis] for axis in axes)
        if moved != here and not (form.is_reshaped and math.prod(moved) == math.prod(here)):
            return f"{moved} is not {here}"
        linen_region = _in_stack(linen_cut, linen[n], layers[0])
        nnx_region = _in_stack(nnx_cut, nnx[n], layers[1])
        pieces.append(Piece(None, None, linen_region, nnx_region, axes, layers=layers))
    return pieces


def _axes(form: Form, rank: int) -> tuple[int, ...] | None:
    """The order of the axes of a leaf; one of another rank than the rule's keeps them."""
    axes = tuple(reversed(range(rank))) if form.axes == () else form.axes
    if axes is None or axes == tuple(range(rank)) or sorted(axes) != list(range(rank)):
        return None
    return axes


def _in_stack(cuts: Region, shape: LeafShape, layer: Layer | None) -> Region:
    """The part of a layer's leaf as one of the leaf in which the layers are stacked."""
    if layer is None or not shape:
        return cuts
    stacked = layer.axis % len(shape)
    inside = tuple(cut._replace(axis=cut.axis + (cut.axis >= stacked)) for cut in cuts)
    return layer_cut(shape, layer) + inside


def _in_blocks(shape: tuple[int, ...], region: Region) -> tuple[tuple[int, ...], Region]:
    """A shape that has the blocks of an axis on an axis of their own, and the cuts in it."""
    repeated = next((cut for cut in region if cut.times > 1), None)
    if repeated is None:
        return shape, region
    axis, times = repeated.axis, repeated.times
    inside = tuple(cut._replace(axis=cut.axis + (cut.axis >= axis), times=1) for cut in region)
    return (*shape[:axis], times, shape[axis] // times, *shape[axis + 1 :]), inside


def _whole_rank(value: object, region: Region) -> Any:
    """A part with the axes back that an index took away."""
    axes = tuple(sorted(cut.axis for cut in region if cut.is_index))
    return _numpy_of([value]).expand_dims(value, axes) if axes else value


def _joined(parts: list[tuple[Region, Any]]) -> Any:
    if not parts[0][0]:
        return parts[0][1]
    axis = parts[0][0][0].axis
    by_start: dict[int, list[tuple[Region, Any]]] = {}
    for region, value in parts:
        own = next(cut for cut in region if cut.axis == axis)
        rest = tuple(cut for cut in region if cut.axis != axis)
        by_start.setdefault(own.start, []).append((rest, value))
    along = [_joined(by_start[start]) for start in sorted(by_start)]
    return _numpy_of(along).concatenate(along, axis=axis)


def _numpy_of(values: Sequence[Any]) -> Any:
    """NumPy for host arrays, so that a checkpoint is not put on a device on its way."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
