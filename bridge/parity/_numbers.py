"""Measures the difference of two values, and compares it with the tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bridge._randomness.typed_keys import is_key, to_bits

Verdict: TypeAlias = Literal["bitwise", "close", "nan", "differs"]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two arrays of one dtype may be apart.

    They agree if no element differs by more than `rtol` times the largest magnitude in the first
    model's array, plus `atol`. The magnitude is that of the array and not of the element, because
    an element that cancels to almost nothing consists of rounding errors.

    Attributes:
      rtol: relative to the array's largest magnitude.
      atol: absolute.
    """

    rtol: float
    atol: float = 0.0


# Some tens of roundings of the dtype; whatever is not a float is compared exactly.
TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-11),
    "float32": Tolerance(1e-5),
    "float16": Tolerance(5e-3),
    "bfloat16": Tolerance(3e-2),
    "float8": Tolerance(2.5e-1),
}
EXACT = Tolerance(0.0)
_COMPONENT = {"complex128": "float64", "complex64": "float32"}


@dataclasses.dataclass(frozen=True)
class Compared:
    """One value of model `a` beside its counterpart in model `b`.

    Attributes:
      place: its path in `a`; if the path in `b` differs, it follows behind an arrow.
      verdict: `'bitwise'` if every bit is the same, `'close'` if within tolerance, `'nan'` if all
        else is within tolerance but both sides have NaN, which shows nothing, else `'differs'`.
      max_abs: the largest absolute difference; None if there is nothing to subtract, infinite if
        only one side has a NaN or an infinity.
      max_rel: `max_abs` relative to the magnitude that the tolerance refers to.
      index: where the largest difference is.
      values: the two elements there, as text.
      shapes: the two shapes, None for what is not an array.
      dtypes: the two dtypes, None for what is not an array.
      tolerance: the tolerance that applied.
      note: a remark beside the numbers, such as that one side lacks the value.
    """

    place: str
    verdict: Verdict
    max_abs: float | None = None
    max_rel: float | None = None
    index: tuple[int, ...] | None = None
    values: tuple[str, str] | None = None
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    dtypes: tuple[str | None, str | None] = (None, None)
    tolerance: Tolerance = EXACT
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return self.verdict in ("bitwise", "close")

    @property
    def is_of_one_shape(self) -> bool:
        """Whether both sides have the same shape, or neither is an array."""
        return self.shapes[0] == self.shapes[1]


def table_of(tolerances: Mapping[Any, Any]) -> dict[str, Tolerance]:
    """The tolerances by dtype name, the given ones over the defaults.

    A tolerance is a `Tolerance`, or a number that is its `rtol`.
    """
    given = {
        key if key == "float8" else jnp.dtype(key).name: (
            value if isinstance(value, Tolerance) else Tolerance(float(value))
        )
        for key, value in tolerances.items()
    }
    return {**TOLERANCES, **given}


def compare(
    place: str,
    a: Any,
    b: Any,
    table: Mapping[str, Tolerance],
    *,
    floor: float = 0.0,
    dtypes: bool = True,
) -> Compared:
    """Compares two leaves.

    The reference `a` and its counterpart `b` are arrays, typed keys or any other objects. `floor`
    is the least magnitude that `rtol` is relative to. With `dtypes`, another dtype is a difference.
    NaN on both sides at the same places is agreement.
    """
    if not is_comparable(a) or not is_comparable(b):
        if is_comparable(a) or is_comparable(b):
            note = f"{_kind(a)} against {_kind(b)}"
            return Compared(place, "differs", note=note)
        same = type(a) is type(b) and a == b
        return Compared(place, "bitwise" if same else "differs", values=(_show(a), _show(b)))
    shapes, names = (tuple(a.shape), tuple(b.shape)), (str(a.dtype), str(b.dtype))
    tolerance = max(_tolerance(a, table), _tolerance(b, table), key=lambda t: (t.rtol, t.atol))
    about: dict[str, Any] = {"shapes": shapes, "dtypes": names, "tolerance": tolerance}
    keys = (is_key(a), is_key(b))
    if shapes[0] != shapes[1]:
        return Compared(place, "differs", note="another shape", **about)
    if any(keys) and (not all(keys) or names[0] != names[1]):
        return Compared(place, "differs", note="another kind of key", **about)
    x, y = on_host(a), on_host(b)
    other_dtype = dtypes and names[0] != names[1]
    if names[0] == names[1] and x.tobytes() == y.tobytes():
        return Compared(place, "bitwise", max_abs=0.0, max_rel=0.0, **about)
    apart = distances(x, y)
    worst = np.unravel_index(int(np.argmax(apart)), apart.shape) if apart.size else ()
    max_abs = float(apart[worst]) if apart.size else 0.0
    scale = max(magnitude(x), floor)
    within = max_abs <= tolerance.rtol * scale + tolerance.atol
    count = int(np.sum(np.isinf(apart)))
    elements = [side[worst].item() for side in (x, y)] if apart.size else []
    values: Any = tuple(map(_show, elements))
    if len({*values}) == 1:
        # The same in six digits.
        values = tuple(_show(each, 9) for each in elements)
    notes = [f"{count} non-finite on one side or otherwise"] if count else []
    if other_dtype:
        notes.append("another dtype")
    return Compared(
        place,
        "close" if within and not other_dtype else "differs",
        max_abs=max_abs,
        max_rel=0.0 if max_abs == 0 else (max_abs / scale if scale else float("inf")),
        index=tuple(int(i) for i in worst),
        values=values if apart.size else None,
        note=", ".join(notes),
        **about,
    )


def nan_shows_nothing(found: Compared, a: Any) -> Compared:
    """A comparison with the reference `a`, with the verdict `nan` if both sides agree in NaN."""
    count = nan_count(a) if found.ok else 0
    if not count:
        return found
    note = f"NaN on both sides in {count} of {a.size} elements"
    return dataclasses.replace(found, verdict="nan", note=note)


def lacking(place: str, *, in_b: bool, value: Any) -> Compared:
    """A value that one of the two models does not have."""
    shape = tuple(value.shape) if is_comparable(value) else None
    dtype = str(value.dtype) if is_comparable(value) else None
    return Compared(
        place,
        "differs",
        shapes=(None, shape) if in_b else (shape, None),
        dtypes=(None, dtype) if in_b else (dtype, None),
        note="only in b" if in_b else "only in a",
    )


def worst(compared: Any) -> Compared | None:
    """The comparison that is furthest from agreeing, None if there are none."""
    order = {"bitwise": 0, "close": 1, "nan": 2, "differs": 3}

    def badness(c: Compared) -> tuple[int, float]:
        return order[c.verdict], float("inf") if c.max_rel is None else c.max_rel

    return max(compared, key=badness, default=None)


def is_comparable(value: Any) -> bool:
    """Whether this is an array, concrete or traced, or a NumPy scalar."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def on_host(value: Any) -> np.ndarray[Any, Any]:
    """An array's global value, whatever its sharding; a typed key's data."""
    return np.asarray(to_bits(value))


def nan_count(value: Any) -> int:
    """How many elements of an array are NaN."""
    if not is_comparable(value) or is_key(value) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0
    return int(np.isnan(widened(on_host(value))).sum())


def magnitude(value: Any) -> float:
    """The largest finite magnitude in an array, 0 if there is none."""
    if not is_comparable(value) or is_key(value):
        return 0.0
    x = np.abs(widened(on_host(value)))
    x = x[np.isfinite(x)]
    return float(x.max()) if x.size else 0.0


def distances(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """|x - y| by element: 0 for two NaN and two equal infinities, infinite if one is not finite."""
    if x.dtype.kind in "biu" and y.dtype.kind in "biu":
        # Large integers are not all floats, and unsigned ones wrap around.
        other, found = np.asarray(x != y), np.zeros(x.shape)
        found[other] = np.abs(x[other].astype(object) - y[other].astype(object))
        return found
    x, y = widened(x), widened(y)
    finite = np.isfinite(x) & np.isfinite(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    # Two finite numbers of opposite signs may be further apart than any float.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(same, 0.0, np.where(finite, np.abs(x - y), np.inf))


def widened(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of numbers in double precision."""
    # NumPy warns of signalling NaN, which a damaged array may have.
    with np.errstate(invalid="ignore"):
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _tolerance(value: Any, table: Mapping[str, Tolerance]) -> Tolerance:
    name = str(value.dtype)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return table.get(name, EXACT)
    component = _COMPONENT.get(name, name)
    # float8 and smaller come in many formats.
    return table.get(name) or table.get(component) or table["float8"]


def _kind(value: Any) -> str:
    return f"an array {value.dtype}{list(value.shape)}" if is_comparable(value) else _show(value)


def _show(value: Any, digits: int = 6) -> str:
    if isinstance(value, float | complex | np.floating | np.complexfloating):
        return f"{value:.{digits}g}"
    text = repr(value)
    return text if len(text) < 40 else text[:39] + "…"
