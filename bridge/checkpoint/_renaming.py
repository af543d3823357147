r"""Renames paths by a table of rules, in both directions, without knowing the model.

A rule `'block_(\d+)/Dense_0': r'blocks.\1.linear'` holds for a Linen path that the whole
expression matches, and for all below it. The longest such path decides, and of several rules for
it the first. In the other direction the same rule is read backwards, which needs an expression
that is literal but for its groups.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from bridge._conversion.neutral import Path
from bridge._errors import BridgeError

from ._source import Item, Source
from ._stored import Names
from ._targets import Tree

_STACKED = re.compile(r"\*|\[")
_GROUP = re.compile(r"\((?P<inner>[^()?][^()]*)\)")
_REFERENCE = re.compile(r"\\(?P<number>\d)")
# Characters that make a regular expression more than literal text, outside of its groups.
_SPECIAL = re.compile(r"[.^$*+?{}\[\]|()]")


class RulesError(BridgeError, ValueError):
    """A table of rules cannot be followed.

    Attributes:
        found: what is in it.
        expected: what is needed.
        remedy: what to do.
    """

    def __init__(self, found: str, expected: str, remedy: str):
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(found, expected, remedy)

    def __str__(self) -> str:
        return f"rules: found {self.found}, expected {self.expected}; {self.remedy}"


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
        RulesError: a rule cannot be read, or is about stacked layers, which takes the model's
            shapes.
    """
    _check_readable(table)
    _refuse_stacked(table)
    return [Rule(re.compile(key), value.replace(".", "/"), key) for key, value in table.items()]


def to_linen(table: Mapping[str, str]) -> list[Rule]:
    """Rules that take NNX paths to Linen paths; the inverse of `to_nnx`.

    Raises:
        RulesError: a rule cannot be read, is about stacked layers, or cannot be read backwards.
    """
    _check_readable(table)
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
        raise RulesError(
            f"{problems}, which cannot be read backwards",
            "expressions that are literal but for groups, each used once in the value",
            "write the paths out, or give --model to convert",
        )
    return rules


def rename(paths: Iterable[Path], rules: list[Rule]) -> dict[Path, Path]:
    """The new path by old path.

    Raises:
        RulesError: a rule matches nothing.
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
        raise unmatched(unused)
    return renamed


def unmatched(patterns: Iterable[str]) -> RulesError:
    """The error for expressions that match nothing."""
    return RulesError(
        f"{sorted(patterns)}, which match no path of the checkpoint",
        "entries that match something",
        "python -m bridge inspect shows the paths",
    )


def _check_readable(table: Mapping[str, str]) -> None:
    problems: list[str] = []
    for key, value in table.items():
        try:
            # The references of a value are read even if nothing is found.
            re.compile(key).sub(value.replace(".", "/"), "")
        except (re.error, TypeError, AttributeError, IndexError) as error:
            problems.append(f"{key!r}: {value!r} ({error})")
    if problems:
        raise RulesError(
            f"{'; '.join(problems)}",
            "regular expressions for Linen paths, and NNX paths with groups such as \\1",
            "correct the table",
        )


def _refuse_stacked(table: Mapping[str, str]) -> None:
    stacked = [key for key, value in table.items() if _STACKED.search(value)]
    if stacked:
        raise RulesError(
            f"stacked layers in the rules for {stacked}",
            "paths alone where there is no model",
            "give --model to convert, or use bridge.port",
        )


def _unescaped(piece: str) -> str:
    return re.sub(r"\\(\W)", r"\1", piece).replace("\\", r"\\")


def renamed_item(
    item: Item, names_of: Callable[[Path], Names], renamed: Mapping[Path, Path]
) -> Item:
    """A tree of a checkpoint whose leaves are at other paths; its arrays are where they were."""
    records = []
    for record in item.records:
        path = renamed[record.path]
        old, new = len(names_of(record.path)), names_of(path)
        stored = {(*new, *names[old:]): each for names, each in record.stored.items()}
        records.append(dataclasses.replace(record, path=path, stored=stored))
    return dataclasses.replace(item, records=records)


def for_target(source: Source, target: Tree | None, table: Mapping[str, str]) -> Source:
    """A checkpoint whose model's paths are those of a target of the other side.

    Raises:
        RulesError: a rule cannot be followed, both sides are of one library, or two leaves get one
            path.
    """
    if target is None:
        raise RulesError("no target", "one of the other library", "give it, or leave rules out")
    is_linen = source.layout == "linen" or source.written_by == "linen"
    to_other = target.side == "nnx"
    if is_linen != to_other:
        kind = "Linen" if is_linen else "NNX"
        raise RulesError(
            f"a checkpoint and a target that are both of {kind}",
            "a table from the paths of the one to those of the other",
            "leave rules out",
        )
    rules = to_nnx(table) if to_other else to_linen(table)
    first = 0 if source.layout == "nnx" else 1
    paths = {record.path: record.path[first:] for record in source.variables.records}
    new = rename(dict.fromkeys(paths.values()), rules)
    renamed = {old: (*old[:first], *_keys(new[path])) for old, path in paths.items()}
    if len(set(renamed.values())) != len(renamed):
        raise RulesError("one new path for several leaves", "another for each", "correct the table")
    item = renamed_item(source.variables, source.names, renamed)
    return dataclasses.replace(source, variables=item)


def _keys(path: Path) -> Path:
    """Keys as NNX has them: those of an `nnx.List` are integers."""
    return tuple(int(key) if str(key).isdecimal() else key for key in path)
