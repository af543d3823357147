"""The collections of an NNX state, which tells none, from a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bridge._conversion.neutral import Path
from bridge.checkpoint._renaming import unmatched

from ._input_errors import InputError


def collections_of(
    paths: Iterable[Path], others: Iterable[Path], table: Mapping[str, str]
) -> dict[Path, str]:
    """The collection of each NNX path, which tells none itself.

    Args:
        paths: those that need one.
        others: those that may have one.
        table: collections by regular expressions.

    Raises:
        InputError: a path that no expression matches, or an expression that matches none.
    """
    patterns = [(re.compile(pattern), pattern) for pattern in table]
    found: dict[Path, str] = {}
    unused, unknown = set(table), []
    needed = set(paths)
    for path in (*needed, *others):
        text = ".".join(map(str, path))
        hit = next((key for pattern, key in patterns if pattern.fullmatch(text)), None)
        if hit is None:
            unknown += [text] if path in needed else []
        else:
            unused.discard(hit)
            found[path] = table[hit]
    if unused:
        raise unmatched(unused)
    if unknown:
        raise InputError(
            "CHECKPOINT",
            f"an NNX state, which does not tell the collections of {', '.join(sorted(unknown))}",
            "an entry for each of them in the table [collections] of --rules",
            '".*" = "params" as the last entry takes all others; --model tells the collections too',
        )
    return found
