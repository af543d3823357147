"""Sums, products, multiples and parts of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def forms(texts: list[str]) -> Iterator[tuple[str, Any]]:
    """Expressions of the sizes with these texts, each with what computes it from their values."""

    def product(a: str, b: str) -> Any:
        return lambda t: t[a] * t[b]

    def total(a: str, b: str) -> Any:
        return lambda t: t[a] + t[b]

    def multiple(a: str, k: int) -> Any:
        return lambda t: t[a] * k

    def part(a: str, k: int) -> Any:
        return lambda t: t[a] // k if t[a] % k == 0 else None

    texts = [text for text in texts if not text.isdecimal()] + [t for t in texts if t.isdecimal()]
    for text in texts:
        if text.isdecimal():
            continue
        for k in (2, 3, 4, 8, 16):
            yield f"{k} * {text}", multiple(text, k)
            yield f"{text} // {k}", part(text, k)
    for a, b in itertools.combinations_with_replacement(texts, 2):
        yield f"{a} + {b}", total(a, b)
        if not a.isdecimal() and not b.isdecimal():
            yield f"{a} * {b}", product(a, b)
