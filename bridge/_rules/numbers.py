"""Names with numbers in them: which ones form a sequence, and many of them as one short text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Up to so many rows are shown one by one.
_ENOUGH = 4
_DIGITS = re.compile(r"(\d+)")


class Numbered(NamedTuple):
    """A text taken apart at its numbers.

    There is one piece more than there are numbers. `digits` has the numbers as they are written.
    """

    pieces: tuple[str, ...]
    digits: tuple[str, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers themselves."""
        return tuple(map(int, self.digits))


def numbered(text: str) -> Numbered:
    """A text taken apart at its numbers."""
    parts = _DIGITS.split(text)
    return Numbered(tuple(parts[::2]), tuple(parts[1::2]))


def families(texts: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Texts that differ in their numbers alone, together and in the order of the numbers."""
    found: dict[tuple[str, ...], list[str]] = {}
    for text in texts:
        found.setdefault(numbered(text).pieces, []).append(text)
    return {pieces: sorted(own, key=natural) for pieces, own in found.items()}


def natural(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A key that sorts `layer_10` behind `layer_9`."""
    pieces, digits = numbered(text)
    return pieces, tuple(map(int, digits))


def sequence(texts: Sequence[str]) -> list[int] | None:
    """The numbers in which texts differ; None if they differ in anything else, or in two places."""
    split = [numbered(text) for text in texts]
    if len({each.pieces for each in split}) != 1:
        return None
    columns = [c for c in zip(*(each.numbers for each in split), strict=True) if len({*c}) > 1]
    return list(columns[0]) if len(columns) == 1 and len({*columns[0]}) == len(texts) else None


def folded(texts: Sequence[str]) -> list[str]:
    """Texts as few texts: `layers.{0..49}.kernel` for those that differ in their numbers alone."""
    found: list[str] = []
    for pieces, own in families(dict.fromkeys(texts)).items():
        columns = [sorted({*c}) for c in zip(*(numbered(t).numbers for t in own), strict=True)]
        # Only a full grid of numbers is told by its columns.
        if len(own) == 1 or math.prod(map(len, columns)) != len(own):
            found += own
            continue
        shown = [*map(_range_text, columns), ""]
        found.append("".join(map("".join, zip(pieces, shown, strict=True))))
    return found


def folded_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of texts as few rows: those of repeated blocks as one, if each column is one text.

    Few rows stay as they are, and so do rows with numbers that one text cannot express.
    """
    alike: dict[object, list[tuple[str, ...]]] = {}
    for row in rows:
        alike.setdefault(tuple(numbered(text).pieces for text in row), []).append(row)
    found: list[tuple[str, ...]] = []
    for group in alike.values():
        columns = [folded(column) for column in zip(*group, strict=True)]
        is_one = len(group) >= _ENOUGH and all(len(column) == 1 for column in columns)
        found += [tuple(column[0] for column in columns)] if is_one else group
    return found


def _range_text(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
