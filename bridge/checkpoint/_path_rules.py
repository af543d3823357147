r"""Rules that say which Linen path is which NNX path, read in both directions.

A rule `'block_(\d+)/Dense_0': r'blocks.\1.linear'` holds for a Linen path that the whole
expression matches, and for all below it. The longest such path decides, and of several rules for
it the first. In the other direction the same rule is read backwards, which needs an expression
that is literal but for its groups.

`'layers': 'blocks.*'` and `r'block_(\d+)': r'blocks[\1]'` are about layers that one side keeps
stacked: one leaf of the one side then is several of the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from bridge._conversion.rule_paths import Segment, segments
from bridge._errors import BridgeError

_GROUP = re.compile(r"\((?P<inner>[^()?][^()]*)\)")
_REFERENCE = re.compile(r"\\(?P<number>\d)")
# Characters that make a regular expression more than literal text, outside of its groups.
_SPECIAL = re.compile(r"[.^$*+?{}\[\]|()]")
# Where the number of an entry stands in a template.
NUMBER = "\0"


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


class StackedLayer(NamedTuple):
    """One of several layers that are stacked."""

    axis: int
    number: int


class Landing(NamedTuple):
    """Where a source path goes by one rule.

    Attributes:
        template: the target path joined by `/`; in it `NUMBER` stands for the number of the
            source's entry, if the source is stacked.
        axis: the axis on which the source's leaves are stacked, None if they are not.
        number: which of its entries goes here, None for all of them.
        admits: what the number of an entry must match.
        entry: which entry of the target's leaves this is, None if they are not stacked.
    """

    template: str
    axis: int | None = None
    number: int | None = None
    admits: str = r"\d+"
    entry: StackedLayer | None = None


class Rule(NamedTuple):
    """One direction of a rule.

    Attributes:
        pattern: for a source path joined by `/`.
        landing: where a match of the pattern goes.
        name: the rule's key in the table.
        is_stacked: whether it is about stacked layers.
    """

    pattern: re.Pattern[str]
    landing: Callable[[re.Match[str]], Landing]
    name: str
    is_stacked: bool


Table: TypeAlias = Mapping[str, str]


def to_nnx(table: Table) -> list[Rule]:
    """Rules that take Linen paths to NNX paths.

    Raises:
        RulesError: a rule cannot be read.
    """
    return [_forward(key, parts) for key, parts in _read(table).items()]


def to_linen(table: Table) -> list[Rule]:
    """Rules that take NNX paths to Linen paths; the inverse of `to_nnx`.

    Raises:
        RulesError: a rule cannot be read, or cannot be read backwards.
    """
    made = {key: _backward(key, parts) for key, parts in _read(table).items()}
    problems = [key for key, rule in made.items() if rule is None]
    if problems:
        raise RulesError(
            f"{problems}, which cannot be read backwards",
            "expressions that are literal but for groups, each used once in the value",
            "write the paths out, or give --model to convert",
        )
    return [rule for rule in made.values() if rule is not None]


def refuse_stacked(rules: list[Rule]) -> None:
    """Raises RulesError if rules are about stacked layers."""
    stacked = [rule.name for rule in rules if rule.is_stacked]
    if stacked:
        raise RulesError(
            f"stacked layers in the rules for {stacked}",
            "rules that only rename paths, as there is no model",
            "give --model to convert, or use bridge.port",
        )


def _read(table: Table) -> dict[str, list[Segment]]:
    """The NNX path of each rule in its segments."""
    found: dict[str, list[Segment]] = {}
    problems: list[str] = []
    for key, value in table.items():
        try:
            # The references of a value are read even if nothing is found.
            re.compile(key).sub(value.replace(".", "/"), "")
            parts = segments(value)
            if parts is None or sum(part.name is None for part in parts) > 1:
                raise ValueError("no NNX path with dots, with one * or [number] at the most")
            if sum(part.number is not None for part in parts) > 1:
                raise ValueError("two [number] in one path")
        except (re.error, TypeError, AttributeError, IndexError, ValueError) as error:
            problems.append(f"{key!r}: {value!r} ({error})")
        else:
            found[key] = parts
    if problems:
        raise RulesError(
            f"{'; '.join(problems)}",
            "regular expressions for Linen paths, and NNX paths with groups such as \\1",
            "correct the table",
        )
    return found


def _forward(key: str, parts: list[Segment]) -> Rule:
    axis = next((part.axis for part in parts if part.name is None), None)
    stacked = next((part for part in parts if part.number is not None), None)

    def landing(hit: re.Match[str]) -> Landing:
        names = [NUMBER if part.name is None else hit.expand(part.name) for part in parts]
        entry = None
        if stacked is not None and stacked.number is not None:
            index = hit.expand(stacked.number) if stacked.number[0] == "\\" else stacked.number
            if not index.isdecimal():
                raise RulesError(
                    f"{index!r} for the number in the rule for {key!r}",
                    "a number",
                    "correct the table",
                )
            entry = StackedLayer(stacked.axis, int(index))
        return Landing("/".join(names), axis, entry=entry)

    return Rule(re.compile(key), landing, key, _is_stacked(parts))


def _backward(key: str, parts: list[Segment]) -> Rule | None:
    """The rule read backwards; None if that cannot be done."""
    groups = [match["inner"] for match in _GROUP.finditer(key)]
    pieces = _GROUP.split(key)[::2]
    literal = [re.sub(r"\\(\W)", "", piece) for piece in pieces]
    texts = [text for part in parts for text in (part.name, part.number) if text is not None]
    used = [int(match["number"]) for text in texts for match in _REFERENCE.finditer(text)]
    if any(_SPECIAL.search(p) or "\\" in p for p in literal):
        return None
    if sorted(used) != list(range(1, len(groups) + 1)):
        return None
    patterns: list[str] = []
    axis = index = numbered = star = None
    for part in parts:
        if part.name is None:
            patterns.append(r"(?P<star>\d+)")
            star = part.axis
            continue
        split = _REFERENCE.split(part.name)
        pattern = re.escape(split[0])
        for number, rest in zip(split[1::2], split[2::2], strict=True):
            pattern += f"(?P<g{number}>{groups[int(number) - 1]}){re.escape(rest)}"
        patterns.append(pattern)
        if part.number is not None:
            axis = part.axis
            numbered = int(part.number[1:]) if part.number.startswith("\\") else None
            index = None if numbered else int(part.number)

    def landing(hit: re.Match[str]) -> Landing:
        template = _unescaped(pieces[0])
        for number, piece in enumerate(pieces[1:], start=1):
            template += NUMBER if number == numbered else hit[f"g{number}"]
            template += _unescaped(piece)
        entry = None if star is None else StackedLayer(star, int(hit["star"]))
        admits = groups[numbered - 1] if numbered else r"\d+"
        return Landing(template, axis, index, admits, entry)

    return Rule(re.compile("/".join(patterns)), landing, key, _is_stacked(parts))


def _is_stacked(parts: list[Segment]) -> bool:
    return any(part.is_stacked for part in parts)


def _unescaped(piece: str) -> str:
    return re.sub(r"\\(\W)", r"\1", piece)
