r"""Renames paths by a table of rules, in both directions, without knowing the model.

A rule `'block_(\d+)/Dense_0': r'blocks.\1.linear'` holds for a Linen path that the whole
expression matches, and for all below it. The longest such path decides, and of several rules for
it the first. In the other direction the same rule is read backwards, which needs an expression
that is literal but for its groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bridge._neutral import Path

from ._input_errors import InputError

_STACKED = re.compile(r"\*|\[")
_GROUP = re.compile(r"\((?P<inner>[^()?][^()]*)\)")
_REFERENCE = re.compile(r"\\(?P<number>\d)")
# What a regular expression must not hold outside of its groups to be a text.
_SPECIAL = re.compile(r"[.^$*+?{}\[\]|()]")


class Rule(NamedTuple):
    """One direction of a rule.

    Attributes:
        pattern: for a source path joined by `/`.
        template: the target path joined by `/`, with references to groups.
        name: the rule's key in the table.
    """

    pattern: re.Pattern[str]
    template: str
    name: str


def to_nnx(table: Mapping[str, str]) -> list[Rule]:
    """Rules that take Linen paths to NNX paths.

    Raises:
        InputError: a rule is about stacked layers, which takes the model's shapes.
    """
    _refuse_stacked(table)
    return [Rule(re.compile(key), value.replace(".", "/"), key) for key, value in table.items()]


def to_linen(table: Mapping[str, str]) -> list[Rule]:
    """Rules that take NNX paths to Linen paths; the inverse of `to_nnx`.

    Raises:
        InputError: a rule is about stacked layers, or cannot be read backwards.
    """
    _refuse_stacked(table)
    rules, problems = [], []
    for key, value in table.items():
        groups = [match["inner"] for match in _GROUP.finditer(key)]
        pieces = _GROUP.split(key)[::2]
        used = [int(match["number"]) for match in _REFERENCE.finditer(value)]
        literal = [re.sub(r"\\(\W)", "", piece) for piece in pieces]
        if any(_SPECIAL.search(p) or "\\" in p for p in literal) or sorted(used) != list(
            range(1, len(groups) + 1)
        ):
            problems.append(key)
            continue
        # The target's groups are in the order in which the value names them.
        position = {number: index + 1 for index, number in enumerate(used)}
        template = _unescaped(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            template += f"\\{position[index]}{_unescaped(piece)}"
        parts = _REFERENCE.split(value.replace(".", "/"))
        pattern = re.escape(parts[0])
        for number, rest in zip(parts[1::2], parts[2::2], strict=True):
            pattern += f"({groups[int(number) - 1]}){re.escape(rest)}"
        rules.append(Rule(re.compile(pattern), template, key))
    if problems:
        raise InputError(
            "--rules",
            f"{problems}, which cannot be read backwards",
            "expressions that are literal but for groups, each used once in the value",
            "write the paths out, or give --model",
        )
    return rules


def rename(paths: Iterable[Path], rules: list[Rule]) -> dict[Path, Path]:
    """The new path by old path.

    Raises:
        InputError: a rule matches nothing.
    """
    unused = {rule.name for rule in rules}
    renamed: dict[Path, Path] = {}
    for path in paths:
        renamed[path] = path
        # The longest hit comes last.
        for length in range(1, len(path) + 1):
            text = "/".join(map(str, path[:length]))
            hits = [(rule, hit) for rule in rules if (hit := rule.pattern.fullmatch(text))]
            unused -= {rule.name for rule, _ in hits}
            if hits:
                new = hits[0][1].expand(hits[0][0].template)
                renamed[path] = (*(new.split("/") if new else ()), *path[length:])
    if unused:
        raise _unmatched(unused)
    return renamed


def collections_of(paths: Iterable[Path], table: Mapping[str, str]) -> dict[Path, str]:
    """The collection of each NNX path, which tells none itself.

    Raises:
        InputError: a path that no expression matches, or an expression that matches none.
    """
    patterns = [(re.compile(pattern), pattern) for pattern in table]
    found: dict[Path, str] = {}
    unused, unknown = set(table), []
    for path in paths:
        text = ".".join(map(str, path))
        hit = next((key for pattern, key in patterns if pattern.fullmatch(text)), None)
        if hit is None:
            unknown.append(text)
        else:
            unused.discard(hit)
            found[path] = table[hit]
    if unused:
        raise _unmatched(unused)
    if unknown:
        raise InputError(
            "CHECKPOINT",
            f"an NNX state, which does not tell the collections of {', '.join(sorted(unknown))}",
            "an entry for each of them in the table [collections] of --rules",
            '".*" = "params" as the last entry takes all others',
        )
    return found


def _unmatched(patterns: Iterable[str]) -> InputError:
    return InputError(
        "--rules",
        f"{sorted(patterns)}, which match no path of the checkpoint",
        "entries that match something",
        "python -m bridge inspect shows the paths",
    )


def _refuse_stacked(table: Mapping[str, str]) -> None:
    stacked = [key for key, value in table.items() if _STACKED.search(value)]
    if stacked:
        raise InputError(
            "--rules",
            f"stacked layers in the rules for {stacked}",
            "paths alone where there is no model",
            "give --model",
        )


def _unescaped(piece: str) -> str:
    return re.sub(r"\\(\W)", r"\1", piece).replace("\\", r"\\")
