"""Holds the result of a rewriting: sources, rules, a level for each class, and the proof."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from bridge import parity
from bridge._html_page import page_of
from bridge.rewrite._failures import RewriteError
from bridge.rewrite.plan._refusals import Refusal

from ._writing import changed_files, is_changed, shown_path, write_files, write_in_place

Level: TypeAlias = Literal["proven", "proven for this configuration", "needs review", "left Linen"]
LEVELS: tuple[Level, ...] = (
    "proven",
    "proven for this configuration",
    "needs review",
    "left Linen",
)

# Of the classes that `difflib` gives to the cells of its table.
_STYLE = """
table.diff { border-collapse: collapse; margin-bottom: 2rem; }
table.diff td { padding: 0 0.3em; }
td.diff_header, .diff_next { color: GrayText; text-align: right; }
th.diff_header { text-align: left; }
.diff_add { background: rgb(0 160 0 / 25%); }
.diff_chg { background: rgb(200 160 0 / 30%); }
.diff_sub { background: rgb(220 0 0 / 25%); }
"""


@dataclasses.dataclass(frozen=True)
class ClassResult:
    """The result for one Linen class.

    Attributes:
        name: the name of the class.
        file: the file that defines it.
        line: the line of `class`.
        level: one of `LEVELS`.
        notes: why the level is not "proven", each with a line of `file` where there is one.
        refusals: why the class, or a layer in it, stays Linen, and what you can do.
    """

    name: str
    file: str
    line: int
    level: Level
    notes: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """The result of `bridge.rewrite`.

    No file is written before `write` is called.

    Attributes:
        classes: each class of the package that the trace reached.
        sources: the texts of the new files by path.
        old_sources: the path of the old file that each new file comes from.
        rules: NNX paths by Linen paths, for `bridge.port`, `bridge.parity` and
            `checkpoint.restore`.
        reports: the reports of `bridge.parity.check`, by what was compared; empty if nothing was.
        sizes: the arguments that the model's constructor takes besides its fields, for each entry
            point.
        root: the name of the model's class.
        notes: notes that do not belong to a single class.
        find_places: computes `places`.
        make_test: returns the text of the test that `write(test=True)` writes, None if the program
            was not proven.
        programs: the runs in which both models traced to the same program. Results and gradients
            are equal there and need not be computed.
        make_in_place: does what `in_place` does.
        parts: the classes that were proven by themselves because the class of the model stays
            Linen.
        native_share: the share of the parameters that are in native NNX layers, from 0 to 1.
        as_linen: whether the old files keep Linen classes that run the new classes.
        exported: the names of these Linen classes.
        make_linen_texts: returns the old files with these Linen classes.
        training: the functions that train the model, None if no sample was given.
        further_rules: the rules of the other models that entry points make, by class; `write`
            writes a file for each.
        left_shares: by class, the share of the parameters that the class keeps from being native,
            largest first.
        check_sources: raises an error if an old file was changed since it was read.
    """

    classes: tuple[ClassResult, ...]
    sources: Mapping[str, str]
    old_sources: Mapping[str, str]
    rules: Mapping[str, str]
    reports: Mapping[str, parity.Report]
    sizes: tuple[Mapping[str, Any], ...]
    root: str
    notes: tuple[str, ...] = ()
    find_places: Callable[[], Iterable[str]] | None = dataclasses.field(default=None, repr=False)
    make_test: Callable[[], str] | None = dataclasses.field(default=None, repr=False)
    programs: tuple[str, ...] = ()
    make_in_place: Callable[[Iterable[str]], Mapping[str, str]] | None = dataclasses.field(
        default=None, repr=False
    )
    parts: tuple[str, ...] = ()
    native_share: float = 0.0
    as_linen: bool = False
    exported: tuple[str, ...] = ()
    make_linen_texts: Callable[[], Mapping[str, str]] | None = dataclasses.field(
        default=None, repr=False
    )
    training: Training | None = None
    further_rules: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    left_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    check_sources: Callable[[], None] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def places(self) -> tuple[str, ...]:
        """The places where the rest of the package makes, calls, trains and saves the models.

        Each comes with its replacement, and none of them is rewritten. The first access reads the
        files of the package.
        """
        return () if self.find_places is None else tuple(self.find_places())

    @property
    def ok(self) -> bool:
        """Whether every class is rewritten and the program is proven, including its training."""
        is_trained = self.training is None or self.training.is_proven
        return (
            self.is_proven
            and is_trained
            and all(c.level in ("proven", "proven for this configuration") for c in self.classes)
        )

    @property
    def is_proven(self) -> bool:
        """Whether the new program was run and does the same as the old one.

        If the class of the model stays Linen, this is about its rewritten parts.
        """
        return bool(self.reports) and all(report.ok for report in self.reports.values())

    @property
    def max_difference(self) -> float | None:
        """The largest absolute difference of an output, None if nothing was compared."""
        found = [
            c.max_abs
            for report in self.reports.values()
            for section in report.sections
            if section.name == "outputs"
            for c in section.compared
            if c.max_abs is not None
        ]
        return max(found, default=None)

    @property
    def diff(self) -> str:
        """The new files beside the old ones, as a unified diff."""
        lines: list[str] = []
        for path, text in self.sources.items():
            old = self.old_sources[path]
            before = pathlib.Path(old).read_text(encoding="utf-8").splitlines(keepends=True)
            lines += difflib.unified_diff(
                before, text.splitlines(keepends=True), shown_path(old), shown_path(path)
            )
        for path, text in self.linen_texts.items():
            before = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
            shown = shown_path(path)
            lines += difflib.unified_diff(before, text.splitlines(keepends=True), shown, shown)
        return "".join(lines)

    @property
    def rules_text(self) -> str:
        """The rules as TOML, as `python -m bridge convert --rules` takes them."""
        return _toml(self.rules)

    def html(self) -> str:
        """A page with the old and the new files side by side."""
        tables: list[str] = []
        for path, text in self.sources.items():
            old = self.old_sources[path]
            before = pathlib.Path(old).read_text(encoding="utf-8").splitlines()
            tables.append(
                difflib.HtmlDiff(wrapcolumn=80).make_table(
                    before, text.splitlines(), shown_path(old), shown_path(path)
                )
            )
        return page_of(", ".join(map(shown_path, self.sources)), tables, _STYLE)

    def write(
        self,
        *,
        overwrite: bool = False,
        test: bool = False,
        in_place: bool = False,
        by_hand: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Writes the new files and the rules: all of them, or none.

        Args:
            overwrite: whether to replace files that the rewriter did not write, or that were
                changed since it wrote them.
            test: whether to write a test that compares the two models, too.
            in_place: whether to put the new classes into the old files instead of new ones.
            by_hand: as for the method `in_place`.

        Returns:
            The paths of the files that are new or changed.

        Raises:
            RewriteError: `overwrite` would be needed, the test cannot be written, the files cannot
                be rewritten in place, or an old file was changed since it was read.
        """
        if self.as_linen:
            texts = self.linen_texts
            files = {path: text for path, text in self._files(test=test).items() if texts}
            return write_in_place(texts, files)
        if not in_place:
            if self.check_sources is not None:
                self.check_sources()
            return write_files(self._files(test=test), overwrite=overwrite)
        if test:
            raise RewriteError(
                "the test cannot be written",
                ["it compares with the Linen model, which would be gone"],
                "Write the new files beside the old ones first, with the test.",
            )
        # Their lines are those of the files as they were, like those of all other results.
        self.places  # noqa: B018
        texts = self.in_place(by_hand)
        main = pathlib.Path(next(iter(reversed(list(texts)))))
        return write_in_place(texts, self._rules_files(main))

    @property
    def linen_texts(self) -> Mapping[str, str]:
        """The old files by path, with Linen classes that run the new NNX classes.

        Raises:
            RewriteError: a file was changed since it was read.
        """
        return {} if self.make_linen_texts is None else self.make_linen_texts()

    def in_place(self, by_hand: Iterable[str] = ()) -> Mapping[str, str]:
        """The old files with the new classes in place of the old ones.

        Args:
            by_hand: files that you change by hand because they use the old classes, or because
                their classes need review.

        Returns:
            The texts of the files by path.

        Raises:
            RewriteError: a class of these files stays Linen, the package uses one in another way,
                or a file was changed since it was read. The error lists all obstacles.
        """
        if self.make_in_place is None:
            raise RewriteError(
                "the files cannot be rewritten in place",
                ["nothing was rewritten"],
                "See what stays Linen and why in the report.",
            )
        return self.make_in_place(by_hand)

    def pending(self) -> tuple[str, ...]:
        """The files that `write` would make or change."""
        linen = [p for p, text in self.linen_texts.items() if is_changed(p, text)]
        if self.as_linen and not linen:
            return ()
        return (*linen, *map(str, changed_files(self._files())))

    def _files(self, *, test: bool = False) -> dict[str, str]:
        files = dict(self.sources)
        if test and self.make_test is None:
            raise RewriteError(
                "the test cannot be written",
                ["the program was not proven"],
                "See what stays Linen and why in the report.",
            )
        if self.sources:
            main = next(iter(reversed(list(self.sources))))
            if test and self.make_test is not None:
                path = pathlib.Path(main)
                files[str(path.with_name(f"test_{path.name}"))] = self.make_test()
            files |= self._rules_files(main)
        return files

    def _rules_files(self, main: str | pathlib.Path) -> dict[str, str]:
        """The texts of the rules of all models by path, beside the main file."""
        path = pathlib.Path(main)
        return {str(path.with_suffix(".rules.toml")): self.rules_text} | {
            str(path.with_suffix(f".{name}.rules.toml")): _toml(rules)
            for name, rules in self.further_rules.items()
        }

    def to_json(self, indent: int | None = None) -> str:
        """The result as a JSON document."""
        return json.dumps(
            {
                "ok": self.ok,
                "is_proven": self.is_proven,
                "max_difference": self.max_difference,
                "root": self.root,
                "classes": [dataclasses.asdict(each) for each in self.classes],
                "sources": dict(self.sources),
                "rules": dict(self.rules),
                "further_rules": {k: dict(v) for k, v in self.further_rules.items()},
                "sizes": [{k: _plain(v) for k, v in each.items()} for each in self.sizes],
                "reports": {k: json.loads(v.to_json()) for k, v in self.reports.items()},
                "programs": list(self.programs),
                "parts": list(self.parts),
                "native_share": self.native_share,
                "left_shares": dict(self.left_shares),
                "notes": list(self.notes),
                "places": list(self.places),
                "training": dataclasses.asdict(self.training) if self.training else None,
            },
            indent=indent,
            allow_nan=False,
        )

    def __str__(self) -> str:
        counts = collections.Counter(each.level for each in self.classes)
        summary = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level])
        lines = [f"{self.root}: {summary or 'no classes'}; {self.native}; {self.verdict}"]
        width = max((len(each.name) for each in self.classes), default=0)
        for each in self.classes:
            lines.append(f"  {each.name:<{width}}  {each.level}")
            lines += [f"  {'':<{width}}    {note}" for note in each.notes]
        if self.remedies:
            lines += ["To rewrite more:", *(f"  {each}" for each in self.remedies)]
        if self.places:
            lines.append("To change by hand:")
        lines += [f"  {place}" for place in self.places]
        return "\n".join([*lines, *(self.training.shown() if self.training else ()), *self.notes])

    @property
    def remedies(self) -> tuple[str, ...]:
        """What you can do about each refusal, by the ids that the notes name."""
        found = [refusal for each in self.classes for refusal in each.refusals]
        return tuple(dict.fromkeys(f"[{each.id}] {each.remedy}" for each in found))

    @property
    def native(self) -> str:
        """The native share of the model in a few words."""
        rewritten = sum(each.level != "left Linen" for each in self.classes)
        # All of them only where nothing is missing, however little.
        share = int(100 * self.native_share)
        return f"native: {rewritten} of {len(self.classes)} classes, {share} % of the parameters"

    @property
    def verdict(self) -> str:
        """The outcome of the proof in a few words."""
        if not self.reports:
            return "the program as a whole is not proven"
        if not self.is_proven:
            return "the program differs"
        what = "its parts are" if self.parts else "the program is"
        is_general = all(each.level != LEVELS[1] for each in self.classes)
        proven = "proven" if is_general else LEVELS[1]
        count = sum(each.level == "needs review" for each in self.classes)
        review = f", but {count} class{'es need' if count > 1 else ' needs'} review"
        difference = f"largest difference {self.max_difference or 0.0:.3g}"
        return f"{what} {proven}{review if count else ''}, {difference}"


def _toml(rules: Mapping[str, str]) -> str:
    rows = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in rules.items()]
    return "\n".join(["[rules]", *rows]) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class FunctionResult:
    """The result for a function, or for a class of states.

    Attributes:
        name: its name.
        file: where it is.
        line: its first line.
        end: its last line.
        refusal: why it stays as it is, None if it is rewritten.
    """

    name: str
    file: str
    line: int
    end: int
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """The rewritten training program.

    Attributes:
        functions: each function that has to change.
        sources: the texts of the new files by path, empty if the program is not proven.
        old_sources: the path of the old file that each new file comes from.
        difference: the largest difference in three steps, None if the program is not proven.
    """

    functions: tuple[FunctionResult, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    old_sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    difference: float | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the new functions ran and did the same as the old ones."""
        return self.difference is not None

    @property
    def left(self) -> tuple[FunctionResult, ...]:
        """The functions that have to change but stay as they are."""
        return tuple(each for each in self.functions if each.refusal is not None)

    def is_about(self, place: str) -> bool:
        """Whether the line of a place, `file.py:12: ...`, was rewritten with the training.

        The file may be a whole path or the end of one.
        """
        file, line, _ = place.split(":", 2)
        return any(
            each.refusal is None
            and f"/{pathlib.PurePath(each.file).as_posix()}".endswith(f"/{file}")
            and each.line <= int(line) <= each.end
            for each in self.functions
        )

    def shown(self) -> Iterator[str]:
        """The lines of the report: the proof, and each function that stays as it is."""
        yield self.verdict
        for each in self.left:
            name = pathlib.PurePath(each.file).name
            yield f"  {name}:{each.line}: {each.name} stays as it is: {each.refusal}"
        for each in dict.fromkeys(r.refusal for r in self.left if r.refusal is not None):
            yield f"  to rewrite more: [{each.id}] {each.remedy}"

    @property
    def verdict(self) -> str:
        """The outcome of the proof in a few words."""
        if self.difference is None:
            return "the training stays as it is"
        count = sum(each.refusal is None for each in self.functions)
        return (
            f"{count} functions of the training are rewritten; three steps are proven,"
            f" largest difference {self.difference:.3g}"
        )
