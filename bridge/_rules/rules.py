r"""The rules that say which Linen path is which NNX path, read in both directions.

A rule is a pair of texts, the same in Python, in TOML and in messages: a regular expression that a
whole Linen path must match, up to some `/`, and the NNX path, with dots, in which `\1` stands for
the first group. What lies below the two goes along.

- ``{r'block_(\d+)/Dense_0': r'blocks.\1.up'}`` is another name.
- ``{'layers': 'blocks.*'}``: the leaves below Linen's `layers` are stacked, and the entries are the
  items of the NNX list `blocks`.
- ``{r'block_(\d+)': r'blocks[\1]'}``: Linen has the layers one by one, and the leaves below the
  NNX module `blocks` are stacked.

The axis is the first one; `blocks.*@1` and `blocks[0@1]` name another. Where the arrays themselves
differ, words behind the NNX path and names in braces say how, from Linen to NNX:

- ``{'attn/query': 'attn.q reshape'}``: to the target's shape in the usual order of the elements, as
  from a `DenseGeneral` to a `Linear`;
- ``{'head': 'head transpose'}``: the axes in the reverse order, or as in `transpose(0, 2, 1)`;
- ``{'attn/qkv': 'attn.{q,k,v}'}``: Linen has as one leaf, side by side on its last axis, what NNX
  has as several;
- ``{'attn/{query,key,value}': 'attn.qkv'}``: the reverse. `{q,k,v@0}` names another axis of the
  fused leaf. Parts may be of several sizes;
- ``{'attn/qkv': 'attn.{12x q,k,v}'}``: the axis holds q, k and v twelve times over, once for each
  head.

The longest Linen path that a rule matches decides, and of several rules for it the first. Where
the paths of both sides are known, rules are followed from Linen to NNX, whichever side the values
come from. Elsewhere a rule that only renames is read backwards, which needs an expression that is
literal but for its groups.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from bridge._errors import BridgeError, shown, with_remedy

Table: TypeAlias = Mapping[str, str]

_SEGMENT = re.compile(
    r"(?P<star>\*)(@(?P<star_axis>-?\d+))?"
    r"|(?P<name>[^\[\]*]+)(\[(?P<index>\\?\d+)(@(?P<axis>-?\d+))?\])?"
)
_BRACES = re.compile(
    r"\{(?:(?P<times>[1-9]\d*)x )?(?P<names>[^{}@]+,[^{}@]+)(?:@(?P<axis>-?\d+))?\}"
)
_QUANTIFIER = re.compile(r"\d+,\d+")
_WORDS = re.compile(
    r"(?P<path>.*?)(?P<transpose> transpose(?:\((?P<axes>[-\d, ]*)\))?)?(?P<reshape> reshape)?",
    re.DOTALL,
)
_GROUP = re.compile(r"\((?P<inner>[^()?][^()]*)\)")
_REFERENCE = re.compile(r"\\(?:g<(\d+)>|(\d))")
# Characters that make a regular expression more than literal text, outside of its groups.
_SPECIAL = re.compile(r"[.^$*+?{}\[\]|()]")


class RulesError(BridgeError, ValueError):
    """A table of rules cannot be followed.

    Attributes:
        found: the problems as one text.
        problems: the problems, one text each.
        expected: what is needed.
        remedy: what to do.
    """

    def __init__(self, found: str | Sequence[str], expected: str, remedy: str):
        self.problems: tuple[str, ...] = (found,) if isinstance(found, str) else tuple(found)
        self.found: str = "; ".join(self.problems)
        self.expected = expected
        self.remedy = remedy
        super().__init__(found, expected, remedy)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"rules: found {self.found}, expected {self.expected}; {self.remedy}"
        return with_remedy("rules", self.problems, f"Expected {self.expected}; {self.remedy}.")


class Segment(NamedTuple):
    """One key of an NNX path in a rule.

    Attributes:
      name: the key; None for all items of a list.
      number: which entry of stacked leaves, a number or a reference to a group; None if the leaves
        are not stacked.
      axis: the axis on which Linen (for all items) or NNX (for an entry) has the leaves stacked.
    """

    name: str | None
    number: str | None = None
    axis: int = 0

    @property
    def text(self) -> str:
        """The key as a rule writes it."""
        axis = f"@{self.axis}" if self.axis else ""
        if self.name is None:
            return f"*{axis}"
        return self.name if self.number is None else f"{self.name}[{self.number}{axis}]"


class Layer(NamedTuple):
    """One of several layers that are stacked.

    Attributes:
      axis: where they are stacked.
      number: which of them this is.
      total: how many there have to be, None if that is not known.
      at: the position in the NNX path of the key that says which, or of the module whose leaves
        are stacked.
    """

    axis: int
    number: int
    total: int | None = None
    at: int = 0


class Form(NamedTuple):
    """How the leaves differ that a rule puts together.

    From Linen to NNX a part is cut out, transposed, reshaped, and put beside the others.

    Attributes:
      axes: for each axis of the NNX part, which axis of the Linen part it is; None if they are in
        the same order, and empty if they are in the reverse order.
      is_reshaped: whether the parts may have other shapes of the same size.
      fused: the side, `linen` or `nnx`, that has several leaves of the other side as one.
      axis: the axis of that leaf on which they lie side by side.
      times: how often they do, each time with an equal share of every part.
    """

    axes: tuple[int, ...] | None = None
    is_reshaped: bool = False
    fused: str | None = None
    axis: int = -1
    times: int = 1

    @property
    def text(self) -> str:
        """What the rule does with the arrays, for reports."""
        words = [] if self.fused is None else ["split" if self.fused == "linen" else "join"]
        words += [] if self.axes is None else ["transpose"]
        words += ["reshape"] if self.is_reshaped else []
        return " and ".join(words)


UNCHANGED = Form()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which Linen path is which NNX path, and how the leaves below them differ.

    `linen` is a regular expression for a Linen path. Raises ValueError if the rule cannot be read;
    the text says why.
    """

    linen: str
    nnx: str

    def __post_init__(self) -> None:
        try:
            self.routes  # noqa: B018
        except (re.error, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"not a regular expression and a path: {error}") from error

    @functools.cached_property
    def form(self) -> Form:
        """How the leaves differ."""
        words = self._words
        listed = words["axes"]
        axes = None
        if words["transpose"]:
            axes = tuple(map(int, listed.split(","))) if listed and listed.strip() else ()
        ours, theirs = _BRACES.search(words["path"]), _braces_of(self.linen)
        braces = ours or theirs
        fused = None if braces is None else "linen" if ours else "nnx"
        axis = int(braces["axis"] or -1) if braces is not None else -1
        times = int(braces["times"] or 1) if braces is not None else 1
        return Form(axes, words["reshape"] is not None, fused, axis, times)

    @functools.cached_property
    def routes(self) -> tuple[Route, ...]:
        """The paths without braces, one pair for each part."""
        path = self._words["path"]
        linen = _without_braces(self.linen, _braces_of(self.linen))
        nnx = _without_braces(path, _BRACES.search(path))
        if len(linen) > 1 < len(nnx):
            raise ValueError("parts in braces on both sides")
        if len(linen) > 1:
            return tuple(Route(self, own, nnx[0], n) for n, own in enumerate(linen))
        return tuple(Route(self, linen[0], own, n) for n, own in enumerate(nnx))

    @functools.cached_property
    def _words(self) -> re.Match[str]:
        # The last group takes what is left, so there is always a match.
        return cast("re.Match[str]", _WORDS.fullmatch(self.nnx))


@dataclasses.dataclass(frozen=True)
class Route:
    """A rule for one part, or the whole rule if it has no parts.

    `linen` is the regular expression for a Linen path, and `part` is the number of the rule's part.
    """

    rule: Rule
    linen: str
    nnx: str
    part: int = 0

    def __post_init__(self) -> None:
        # The references are read even if nothing matches.
        self.pattern.sub(self.nnx.replace(".", "/"), "")
        self.segments  # noqa: B018

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The expression, compiled."""
        return re.compile(self.linen)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The keys of the NNX path, empty for the model itself."""
        found: list[Segment] = []
        for text in self.nnx.split(".") if self.nnx else ():
            match = _SEGMENT.fullmatch(text)
            if match is None:
                raise ValueError(f"not an NNX path with dots: {self.nnx!r}")
            axis = int(match["star_axis"] or match["axis"] or 0)
            found.append(Segment(match["name"], match["index"], axis))
        stars = sum(part.name is None for part in found)
        if stars > 1 or sum(part.number is not None for part in found) > 1:
            raise ValueError(f"more than one * or [number] in {self.nnx!r}")
        return tuple(found)

    @property
    def is_stacked(self) -> bool:
        """Whether one of the two sides has layers stacked."""
        return any(part.name is None or part.number is not None for part in self.segments)

    def target(self, hit: re.Match[str]) -> list[Segment]:
        """The NNX path of a Linen path that the expression matches.

        Raises RulesError if an entry has something else than a number.
        """
        found: list[Segment] = []
        for part in self.segments:
            number = part.number and hit.expand(part.number)
            if number is not None and not number.isdecimal():
                raise RulesError(
                    f"{number!r} for the number in the rule for {self.rule.linen!r}",
                    "a number",
                    "correct the table",
                )
            found.append(Segment(part.name and hit.expand(part.name), number, part.axis))
        return found

    def renaming(self) -> Renaming:
        """The rule for Linen paths, if it only renames."""
        return Renaming(self.pattern, self.nnx.replace(".", "/"))

    def backward(self) -> Renaming | None:
        """The inverse of `renaming`; None if the rule cannot be read backwards."""
        groups = [match["inner"] for match in _GROUP.finditer(self.linen)]
        pieces = _GROUP.split(self.linen)[::2]
        around, used = _taken_apart(self.nnx.replace(".", "/"))
        literal = [re.sub(r"\\(\W)", "", piece) for piece in pieces]
        names = [re.sub(r"\\(\W)", r"\1", piece).replace("\\", r"\\") for piece in pieces]
        if any(_SPECIAL.search(text) or "\\" in text for text in literal):
            return None
        if sorted(used) != list(range(1, len(groups) + 1)):
            return None
        pattern = re.escape(around[0])
        for number, text in zip(used, around[1:], strict=True):
            pattern += f"(?P<g{number}>{groups[number - 1]}){re.escape(text)}"
        template = names[0]
        for number, name in enumerate(names[1:], start=1):
            template += rf"\g<g{number}>{name}"
        return Renaming(re.compile(pattern), template)


class Renaming(NamedTuple):
    """A rule in one direction, for paths joined by `/`; groups of the pattern fill the template."""

    pattern: re.Pattern[str]
    template: str


def _taken_apart(text: str) -> tuple[list[str], list[int]]:
    """What is around the references to groups in a text, and their numbers."""
    split = _REFERENCE.split(text)
    return split[::3], [int(a or b) for a, b in zip(split[1::3], split[2::3], strict=True)]


def table_of(rules: object) -> Table:
    """What a user gave as rules, empty for None.

    Raises RulesError if it is not a table, such as the path of a file.
    """
    if rules is None or isinstance(rules, Mapping):
        return cast("Table", rules or {})
    raise RulesError(
        shown(rules),
        "a dict of NNX paths by regular expressions for Linen paths",
        'read a file by tomllib.loads(pathlib.Path("model.rules.toml").read_text())["rules"]',
    )


def rules_of(table: Table) -> list[Rule]:
    """The rules of a table.

    Raises RulesError if a rule cannot be read.
    """
    rules: list[Rule] = []
    problems: list[str] = []
    for key, value in table_of(table).items():
        try:
            rules.append(Rule(key, value))
        except ValueError as error:
            problems.append(f"{key!r}: {value!r} ({error})")
    if problems:
        raise RulesError(
            problems,
            "regular expressions for Linen paths, and NNX paths with groups such as \\1",
            "correct the table",
        )
    return rules


def read_backward(table: Table) -> list[Renaming]:
    """The rules of a table that only renames, for NNX paths.

    Raises RulesError if a rule cannot be read, or cannot be read backwards.
    """
    routes = [route for rule in rules_of(table) for route in rule.routes]
    made = [route.backward() for route in routes]
    problems = [r.rule.linen for r, one in zip(routes, made, strict=True) if one is None]
    if problems:
        raise RulesError(
            f"{problems}, which cannot be read backwards",
            "expressions that are literal but for groups, each used once in the value",
            "write the paths out",
        )
    return [one for one in made if one is not None]


def _braces_of(linen: str) -> re.Match[str] | None:
    """The names in braces in a regular expression, which also has `{2,3}` for quantifiers."""
    found = _BRACES.finditer(linen)
    return next((each for each in found if not _QUANTIFIER.fullmatch(each["names"])), None)


def _without_braces(text: str, braces: re.Match[str] | None) -> list[str]:
    """A text for each of the names in braces."""
    if braces is None:
        return [text]
    if _BRACES.search(text, braces.end()):
        raise ValueError(f"several braces in {text!r}")
    names = braces["names"].split(",")
    return [text[: braces.start()] + name.strip() + text[braces.end() :] for name in names]
