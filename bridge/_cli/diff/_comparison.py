"""Compares two sets of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bridge._cli._checkpoints import in_order
from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Leaf, Path
from bridge._randomness.typed_keys import is_key, to_bits
from bridge.parity._numbers import distances, widened

# Kinds of dtype that are not numbers: texts, dates and objects.
_NO_NUMBERS = "OSUMm"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that is in both and is not the same.

    Attributes:
        path: its path.
        what: which of `structure`, `shape`, `dtype`, `values` differ.
        shapes: its shape in either, None if it is not one array.
        dtypes: its dtype in either, None likewise.
        max_abs: the largest absolute difference of two elements; None where shapes differ or the
            elements are not numbers, infinity where only one of them is infinite. Elements of
            which only one is NaN have no difference; `nan` counts them.
        max_rel: the largest of |a - b| / |b|, likewise; infinity where only b is zero.
        nan: how many elements are NaN only in the first one, and only in the second.
    """

    path: Path
    what: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_abs: float | None
    max_rel: float | None = None
    nan: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Differences:
    """What is in one set of leaves, in the other, and in both."""

    only_a: tuple[Path, ...]
    only_b: tuple[Path, ...]
    changed: tuple[Difference, ...]
    equal: int

    @property
    def is_same(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_a or self.only_b or self.changed)


def compare(
    a: Mapping[Path, Leaf],
    b: Mapping[Path, Leaf],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
) -> Differences:
    """Compares leaves by path.

    The keys of the paths are text. Values are the same if they differ by at most `atol + rtol *
    |b|`; NaN is the same as NaN. With `ignore_dtype`, the same values in another dtype are the
    same.
    """
    both = sorted(a.keys() & b.keys(), key=in_order)
    pairs = [_difference(path, a[path], b[path], rtol, atol) for path in both]
    ignored = {"dtype"} if ignore_dtype else set()
    changed = tuple(pair for pair in pairs if {*pair.what} - ignored)
    return Differences(
        tuple(sorted(a.keys() - b.keys(), key=in_order)),
        tuple(sorted(b.keys() - a.keys(), key=in_order)),
        changed,
        len(pairs) - len(changed),
    )


class _Distance(NamedTuple):
    """How far the elements of two arrays are from each other, as in `Difference`."""

    is_same: bool
    absolute: float | None = None
    relative: float | None = None
    nan: tuple[int, int] = (0, 0)


def _difference(path: Path, a: Leaf, b: Leaf, rtol: float, atol: float) -> Difference:
    flat_a, tree_a = jax.tree.flatten(a.value)
    flat_b, tree_b = jax.tree.flatten(b.value)
    what: list[str] = []
    found: list[_Distance] = []
    if tree_a != tree_b:
        what.append("structure")
    else:
        # Flax and orbax store a typed key as its bits.
        pairs = [
            (x, y) if is_key(x) == is_key(y) else (to_bits(x), to_bits(y))
            for x, y in zip(flat_a, flat_b, strict=True)
        ]
        if any(np.shape(x) != np.shape(y) for x, y in pairs):
            what.append("shape")
        else:
            found = [_distance(x, y, rtol, atol) for x, y in pairs]
            if not all(distance.is_same for distance in found):
                what.append("values")
        if any(_dtype_of(x) != _dtype_of(y) for x, y in pairs):
            what.append("dtype")
    return Difference(
        path,
        tuple(what),
        (shape_of(a.value), shape_of(b.value)),
        (_dtype_of(a.value), _dtype_of(b.value)),
        max((d.absolute for d in found if d.absolute is not None), default=None),
        max((d.relative for d in found if d.relative is not None), default=None),
        (sum(d.nan[0] for d in found), sum(d.nan[1] for d in found)),
    )


def _distance(x: Any, y: Any, rtol: float, atol: float) -> _Distance:
    """How far two values of one shape are from each other."""
    if isinstance(x, str) or isinstance(y, str):
        return _Distance(x == y)
    x, y = np.asarray(to_bits(x)).ravel(), np.asarray(to_bits(y)).ravel()
    if x.dtype.kind in _NO_NUMBERS or y.dtype.kind in _NO_NUMBERS:
        return _Distance(bool((x == y).all()))
    nan_x, nan_y = (np.isnan(widened(each)) for each in (x, y))
    some = ~(nan_x | nan_y)
    apart, sizes = distances(x, y)[some], np.abs(widened(y))[some]
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(apart == 0, 0.0, apart / sizes)
        # An infinity that is in both has no distance, and else no tolerance.
        near = (apart == 0) | (np.isfinite(sizes) & (apart <= atol + rtol * sizes))
    relative = np.where(np.isnan(relative), np.inf, relative)
    nan = int((nan_x & ~nan_y).sum()), int((nan_y & ~nan_x).sum())
    if not some.any():
        zero = None if any(nan) else 0.0
        return _Distance(not any(nan), zero, zero, nan)
    is_same = bool(near.all()) and not any(nan)
    return _Distance(is_same, float(apart.max()), float(relative.max()), nan)


def _dtype_of(value: Any) -> str | None:
    """The dtype of a leaf's value as text; None if it is not one array."""
    return str(value.dtype) if hasattr(value, "dtype") else None
