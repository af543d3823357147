"""Texts about large models: repeated blocks are folded, and a long text is cut."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MOST_LINES = 180
MOST_CHARACTERS = 24_000
_NUMBER = re.compile(r"(?<=[/._\[])\d+(?=[/.\]]|$)|(?<![^/.])\d+(?=[/.]|$)")


class Run(NamedTuple):
    """Leaves that are alike in blocks that follow each other, or leaves outside of any block.

    Attributes:
      first: the first block's path; empty for leaves outside of blocks.
      last: the last block's path; the same as `first` for one block.
      blocks: how many blocks there are.
      leaves: how many leaves each of them has.
      what: what is said about those leaves: `"bitwise"`, or `"3 bitwise, 1 close"`.
    """

    first: str
    last: str
    blocks: int
    leaves: int
    what: str

    def __str__(self) -> str:
        count = f"{self.leaves} {'leaf' if self.leaves == 1 else 'leaves'}"
        if self.blocks > 1:
            return f"{self.first} ... {self.last}: {count} each, {self.what}"
        return f"{self.first or 'the others'}: {count}, {self.what}"


def folded(entries: Iterable[tuple[str, str]]) -> list[Run]:
    """Folds leaves by the numbered block that they are in.

    Consecutive blocks go together if they have the same leaves, of which the same is said.

    Args:
      entries: (path, what is said about the leaf); a path has `/` or `.` between its parts, and a
        block has a number: `blocks.3`, `blocks_3`, `blocks/3`.

    Returns:
      The runs in the order of their first leaf, with the leaves outside of all blocks first.

    Example::

      >>> from bridge.parity._long_text import folded
      >>> [run] = folded((f"blocks.{i}.{leaf}", "bitwise") for i in range(12) for leaf in "ab")
      >>> str(run)
      'blocks.0 ... blocks.11: 2 leaves each, bitwise'
    """
    others: list[str] = []
    blocks: dict[tuple[str, int, str], dict[str, str]] = {}
    for path, what in entries:
        found = _NUMBER.search(path)
        if found is None:
            others.append(what)
        else:
            end = found.end() + (path[found.end() : found.end() + 1] == "]")
            key = path[: found.start()], int(found.group()), path[:end]
            blocks.setdefault(key, {})[path[end:]] = what
    runs = [Run("", "", 1, len(others), _counted(others))] if others else []
    return [*runs, *_runs(blocks)]


def limited(text: str, rest: str) -> str:
    """A text as it is, or its beginning and where the rest is.

    Args:
      text: any text.
      rest: where the rest is.
    """
    lines = text.splitlines()
    if len(lines) <= MOST_LINES and len(text) <= MOST_CHARACTERS:
        return text
    kept = [line[: MOST_CHARACTERS // 8] for line in lines[:MOST_LINES]]
    while sum(map(len, kept)) > MOST_CHARACTERS:
        kept.pop()
    left = len(lines) - len(kept)
    return "\n".join([*kept, f"... {left} more lines; {rest}" if left else f"... cut; {rest}"])


def _runs(blocks: dict[tuple[str, int, str], dict[str, str]]) -> Iterator[Run]:
    runs: list[list[tuple[str, int, str]]] = []
    for key in blocks:
        last = runs[-1][-1] if runs else None
        follows = last is not None and (last[0], last[1] + 1) == (key[0], key[1])
        if follows and last is not None and blocks[last] == blocks[key]:
            runs[-1].append(key)
        else:
            runs.append([key])
    for keys in runs:
        leaves = list(blocks[keys[0]].values())
        yield Run(keys[0][2], keys[-1][2], len(keys), len(leaves), _counted(leaves))


def _counted(said: Iterable[str]) -> str:
    counts = collections.Counter(said)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {what}" for what, count in counts.items())
