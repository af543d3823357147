"""Describes the numbers of a leaf."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bridge._cli._leaves import has_numbers, widened
from bridge._randomness.typed_keys import is_key


def statistics_of(value: Any) -> dict[str, float | int | None] | None:
    """Smallest, largest, mean and deviation of the finite numbers of a leaf, and how many are not.

    Args:
        value: a leaf's value, of any arrays.

    Returns:
        None if it holds no numbers.
    """
    leaves = [leaf for leaf in jax.tree.leaves(value) if not isinstance(leaf, str)]
    arrays = [np.asarray(leaf) for leaf in leaves if not is_key(leaf)]
    numbers = [widened(array).ravel() for array in arrays if has_numbers(array)]
    if not numbers:
        return None
    every = np.concatenate(numbers)
    nan, infinite = np.isnan(every), np.isinf(every)
    finite = np.abs(every) if every.dtype.kind == "c" else every
    finite = finite[~(nan | infinite)]
    some: dict[str, float | int | None] = dict.fromkeys(("min", "max", "mean", "std"))
    if finite.size:
        some |= {name: float(getattr(finite, name)()) for name in some}
    return {**some, "nan": int(nan.sum()), "infinite": int(infinite.sum())}
