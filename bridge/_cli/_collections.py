"""The collections of an NNX state, which tells none, from a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from bridge._conversion.neutral import Path
from bridge.checkpoint._renaming import unmatched

from ._input_errors import InputError


def collections_of(
    paths: Iterable[Path],
    others: Iterable[Path],
    table: Mapping[str, str],
    within: Sequence[str] = (),
) -> dict[Path, str]:
    """The collection of each NNX path, which tells none itself.

    Args:
        paths: those that need one.
        others: those that may have one.
        table: collections by regular expressions.
        within: the keys that lead to these paths in the checkpoint.

    Raises:
        InputError: a path that no expression matches, or an expression that matches none; or the
            paths lead to Linen variables further down.
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
    inner = sorted({path[: path.index("params", 1)] for path in needed if "params" in path[1:-1]})
    if unknown and inner:
        options = ("--within " + "/".join((*within, *map(str, keys))) for keys in inner)
        raise InputError(
            "CHECKPOINT",
            "Linen variables that lie beside other trees, and not at the top",
            "the keys that lead to them",
            f"give {' or '.join(options)}",
        )
    if unknown:
        raise InputError(
            "CHECKPOINT",
            f"an NNX state, which does not tell the collections of {', '.join(sorted(unknown))}",
            "an entry for each of them in the table [collections] of --rules",
            '".*" = "params" as the last entry takes all others; --model tells the collections too',
        )
    return found
