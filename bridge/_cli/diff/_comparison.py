"""Compares two sets of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bridge._cli._leaves import dtype_of, has_numbers, in_order, widened
from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Leaf, Path
from bridge._randomness.typed_keys import is_key, to_bits


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that is in both and is not the same.

    Attributes:
        path: its path.
        what: which of `structure`, `shape`, `dtype`, `values` differ.
        shapes: its shape in either, None if it is not one array.
        dtypes: its dtype in either, None likewise.
        max_abs: the largest absolute difference of two elements; None where shapes differ or the
            elements are no numbers, infinity where only one of them is infinite. Elements of
            which only one is NaN have no difference; `nan` counts them.
        max_rel: the largest of |a - b| / |b|, likewise; infinity where only b is zero.
        nan: how many elements are NaN in the first one alone, and in the second alone.
    """

    path: Path
    what: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_abs: float | None
    max_rel: float | None = None
    nan: tuple[int, int] = (0, 0)


class _Distance(NamedTuple):
    absolute: float | None
    relative: float | None = None
    nan: tuple[int, int] = (0, 0)

    @property
    def is_zero(self) -> bool:
        return self.absolute in (None, 0.0) and not any(self.nan)


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

    Args:
        a: leaves by path, keys as text.
        b: likewise.
        rtol: values are the same if they differ by at most `atol + rtol * |b|`; NaN is the same as
            NaN.
        atol: see `rtol`.
        ignore_dtype: whether the same values in another dtype are the same.
    """
    both = sorted(a.keys() & b.keys(), key=in_order)
    pairs = [(path, _difference(path, a[path], b[path], rtol, atol)) for path in both]
    changed = [
        difference
        for _, difference in pairs
        if set(difference.what) - ({"dtype"} if ignore_dtype else set())
    ]
    return Differences(
        tuple(sorted(a.keys() - b.keys(), key=in_order)),
        tuple(sorted(b.keys() - a.keys(), key=in_order)),
        tuple(changed),
        len(pairs) - len(changed),
    )


def _difference(path: Path, a: Leaf, b: Leaf, rtol: float, atol: float) -> Difference:
    flat_a, tree_a = jax.tree.flatten(a.value)
    flat_b, tree_b = jax.tree.flatten(b.value)
    what: list[str] = []
    distances: list[_Distance] = []
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
            compared = [_values(x, y, rtol, atol) for x, y in pairs]
            distances = [distance for _, distance in compared]
            if not all(same for same, _ in compared):
                what.append("values")
        if any(dtype_of(x) != dtype_of(y) for x, y in pairs):
            what.append("dtype")
    shapes = shape_of(a.value), shape_of(b.value)
    dtypes = dtype_of(a.value), dtype_of(b.value)
    max_abs, max_rel = (
        max((each for each in own if each is not None), default=None)
        for own in ([d.absolute for d in distances], [d.relative for d in distances])
    )
    nan = sum(d.nan[0] for d in distances), sum(d.nan[1] for d in distances)
    return Difference(path, tuple(what), shapes, dtypes, max_abs, max_rel, nan)


def _values(x: Any, y: Any, rtol: float, atol: float) -> tuple[bool, _Distance]:
    """Whether two values of one shape are the same, and how far they are from each other."""
    if isinstance(x, str) or isinstance(y, str):
        return x == y, _Distance(None)
    x, y = np.asarray(to_bits(x)), np.asarray(to_bits(y))
    if x.size == 0:
        return True, _Distance(0.0, 0.0)
    if not (has_numbers(x) and has_numbers(y)):
        return bool((x == y).all()), _Distance(None)
    distance = _distance(x, y)
    if not (rtol or atol):
        return distance.is_zero, distance
    wide_x, wide_y = widened(x), widened(y)
    return bool(np.isclose(wide_x, wide_y, rtol=rtol, atol=atol, equal_nan=True).all()), distance


def _distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> _Distance:
    if x.dtype.kind in "biu" and y.dtype.kind in "biu":
        # Large integers are not all floats, and unsigned ones wrap around.
        apart = x != y
        pairs = [
            (int(a), int(b)) for a, b in zip(x[apart].tolist(), y[apart].tolist(), strict=True)
        ]
        relative = (abs(a - b) / abs(b) if b else np.inf for a, b in pairs)
        return _Distance(
            float(max((abs(a - b) for a, b in pairs), default=0)), float(max(relative, default=0))
        )
    x, y = widened(x), widened(y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    same = (x == y) | nan_x | nan_y
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = np.where(same, 0.0, np.abs(x - y))
        relative = np.where(same, 0.0, distances / np.abs(y))
    if not (~nan_x & ~nan_y).any():
        both = bool((nan_x & nan_y).all())
        return _Distance(0.0 if both else None, 0.0 if both else None, _only(nan_x, nan_y))
    # NaN arises from infinities of opposite signs, and from a number beside an infinity.
    distances, relative = (np.where(np.isnan(d), np.inf, d) for d in (distances, relative))
    return _Distance(float(distances.max()), float(relative.max()), _only(nan_x, nan_y))


def _only(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[int, int]:
    return int((x & ~y).sum()), int((y & ~x).sum())
