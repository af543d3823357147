"""Which part of a Linen leaf is which part of an NNX leaf, and moving values along it.

A `Piece` says that a region of one leaf is a region of another. A fused kernel has four pieces, a
stacked layer one for each entry, an ordinary leaf one that is the whole of both. Every layer is
described by its pieces once, and both directions read the same ones, so each is the inverse of
the other by construction. Values are only cut and joined: gradients and Adam's moments move in the
same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bridge._conversion.neutral import Address, Path


class Cut(NamedTuple):
    """An interval of one axis.

    Attributes:
      axis: counted from the front, in the whole leaf.
      start: the first index.
      size: how many.
      is_index: whether the axis is gone from the part, which then has `size` 1.
    """

    axis: int
    start: int
    size: int
    is_index: bool = False


Region: TypeAlias = tuple[Cut, ...]
WHOLE: Region = ()


class Piece(NamedTuple):
    """A region of a Linen leaf and the region of an NNX leaf that holds the same values.

    Attributes:
      linen: the Linen leaf, None for what only NNX has.
      nnx: the NNX leaf, None for what only Linen has and what must be zero there.
      linen_region: which part of the Linen leaf.
      nnx_region: which part of the NNX leaf.
      rule: what put the two together, for the report.
    """

    linen: Address
    nnx: Path | None
    linen_region: Region = WHOLE
    nnx_region: Region = WHOLE
    rule: str = ""


def part_shape(shape: Sequence[int], region: Region) -> tuple[int, ...]:
    """The shape of a part of a leaf."""
    cuts = {cut.axis: cut for cut in region}
    kept = [axis for axis in range(len(shape)) if axis not in cuts or not cuts[axis].is_index]
    return tuple(cuts[axis].size if axis in cuts else shape[axis] for axis in kept)


def part(value: Any, region: Region) -> Any:
    """The part of a leaf that a region says; the whole is the same object."""
    if not region:
        return value
    index: list[Any] = [slice(None)] * value.ndim
    for cut in region:
        stop = cut.start + cut.size
        index[cut.axis] = cut.start if cut.is_index else slice(cut.start, stop)
    return value[tuple(index)]


def joined(parts: Sequence[tuple[Region, Any]]) -> Any:
    """The leaf whose parts these are; the inverse of `part` for all of its regions together.

    Args:
      parts: (region, value); the regions cover the leaf, and no two of them overlap.
    """
    region, value = parts[0]
    if not region:
        return value
    return _joined([(region, _whole_rank(value, region)) for region, value in parts])


def covers(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether regions make up a whole leaf, none of it twice.

    Regions that are not all cut along the same axes into parts of the same sizes do not: nothing
    here makes such ones together.
    """
    cuts = {tuple((cut.axis, cut.size) for cut in region) for region in regions}
    size = sum(math.prod(part_shape(shape, region)) for region in regions)
    return len(cuts) == 1 and len(set(regions)) == len(regions) and size == math.prod(shape)


def _whole_rank(value: Any, region: Region) -> Any:
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
