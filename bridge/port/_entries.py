"""The entries of a plan, one for each leaf of the target, and their table."""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jax.core import Tracer
from rich import box
from rich.console import Console
from rich.table import Table

from bridge._conversion.arrays import shape_of
from bridge._conversion.matching import shape_text
from bridge._conversion.neutral import Address, Path
from bridge._layers.table import without_nnx_class
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._rules.numbers import folded, folded_rows, numbered

from ._correspondence import Ambiguous, Correspondence, MisShaped
from ._moving import cast_is_exact, is_unknown, is_zero
from ._rule_text import braced
from ._trees import CACHE, NNXNode, linen_text, nnx_text

CLEAN = frozenset({"matched", "kept"})
_WIDTH = 120
# Up to so many paths of an entry are shown one by one.
_ENOUGH = 4
_MOST_LINES, _MOST_PROBLEMS = 150, 60
_WHOLE = "print(plan.text(whole=True)) shows all"
_COLUMNS = ("", "source", "target", "shape", "by")
_ORDER = ("rule", "ambiguous", "unsupported", "mis-shaped", "missing", "unexpected", "lossy")
_KEEP_WRAPPED = "NNX has no {} layer; keep the Linen module wrapped with bridge.ToNNX"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The result for one leaf: where it goes, or why it cannot move.

    Attributes:
      kind: `matched`; `kept`, if only the target has the leaf; or one of the problems:
        `missing` (the source has nothing for it), `unexpected` (the target has no place for it),
        `mis-shaped`, `lossy` (values would change or be dropped), `ambiguous` (several candidates),
        `unsupported` (a layer that NNX does not have), `rule` (a rule that cannot be followed).
      source: the paths that are read: `params/Dense_0/kernel` for Linen, `fc.kernel` for NNX.
      target: the paths that are written.
      source_shapes: shape and dtype of each source as text.
      target_shapes: shape and dtype of each target as text.
      rule: the reason for the pair: the layer's rule, a name, structure, or the user's rule.
      note: a remark, or what to do.
    """

    kind: str
    source: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    source_shapes: tuple[str, ...] = ()
    target_shapes: tuple[str, ...] = ()
    rule: str = ""
    note: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether this entry keeps `apply` from moving anything."""
        return self.kind not in CLEAN

    def __str__(self) -> str:
        source = ", ".join(map(_shaped, self.source, self.source_shapes or ("",) * 99))
        target = ", ".join(map(_shaped, self.target, self.target_shapes or ("",) * 99))
        both = " -> ".join(text for text in (source, target) if text)
        return f"{self.kind}: {both}" + (f": {self.note}" if self.note else "")


def _shaped(path: str, shape: str) -> str:
    return f"{path} {shape}" if shape else path


class Entries:
    """Makes the entries of a plan in one direction."""

    def __init__(self, correspondence: Correspondence, to_nnx: bool):
        self._found = correspondence
        self._to_nnx = to_nnx
        self._leaves = correspondence.nnx_leaves
        self._values = correspondence.linen_values

    def __iter__(self) -> Iterator[Entry]:
        for problem in self._found.problems:
            yield Entry("rule", (problem.rule,), (problem.target,), note=problem.note)
        yield from map(self._ambiguous, self._found.ambiguous)
        yield from self._together()
        yield from map(self._mis_shaped, self._found.mis_shaped)
        yield from map(self._zero, self._found.zero)
        yield from self._left_over()

    def _directed(
        self,
        kind: str,
        linen: Sequence[Address],
        nnx_nodes: Sequence[NNXNode],
        rule: str = "",
        note: str = "",
    ) -> Entry:
        one = (
            tuple(map(linen_text, linen)),
            tuple(shape_text(self._values[address]) for address in linen),
        )
        other = (
            tuple(nnx_text(node.path) for node in nnx_nodes),
            tuple(shape_text(node.value) for node in nnx_nodes),
        )
        source, target = (one, other) if self._to_nnx else (other, one)
        return Entry(kind, source[0], target[0], source[1], target[1], rule, note)

    def _together(self) -> Iterator[Entry]:
        """One entry for each leaf of the target."""
        by_target = self._found.by_target(to_nnx=self._to_nnx)
        parts = self._found.incomplete()
        target_parts, source_parts = parts[::-1] if self._to_nnx else parts
        incomplete = {*target_parts}
        order: list[Any] = [*self._leaves] if self._to_nnx else [*self._values]
        for target in filter(by_target.__contains__, order):
            pieces = by_target[target]
            linen = list(dict.fromkeys(piece.linen for piece in pieces))
            nodes = [self._leaves[path] for path in dict.fromkeys(piece.nnx for piece in pieces)]
            one, other = [self._values[address] for address in linen], [n.value for n in nodes]
            sources, targets = (one, other) if self._to_nnx else (other, one)
            kind, note = "matched", ""
            if target in incomplete:
                kind, note = "missing", "its parts do not make it up exactly once"
            elif not (
                len({getattr(value, "dtype", None) for value in (*one, *other)}) == 1
                or all(cast_is_exact(value, targets[0]) for value in sources)
            ):
                kind, note = "lossy", "the cast changes values; cast the source beforehand"
            yield self._directed(kind, linen, nodes, pieces[0].rule, note)
        note = "the target takes only part of it"
        for source in source_parts:
            linen, nodes = ([source], []) if self._to_nnx else ([], [self._leaves[source]])
            yield self._directed("unexpected", linen, nodes, note=note)

    def _mis_shaped(self, found: MisShaped) -> Entry:
        node = self._leaves[found.nnx]
        if name := self._class_without_counterpart(found.linen):
            note = _KEEP_WRAPPED.format(name)
            return self._directed("unsupported", [found.linen], [node], found.rule, note)
        note = found.note or self._other_shape(found.linen, node)
        return self._directed("mis-shaped", [found.linen], [node], found.rule, note)

    def _other_shape(self, address: Address, node: NNXNode) -> str:
        """What would fit instead of a leaf of another shape."""
        linen, nnx = shape_of(self._values[address]), shape_of(node.value)
        others = [
            nnx_text(each.nnx)
            for each in self._found.mis_shaped
            if each.nnx != node.path and shape_of(self._leaves[each.nnx].value) == linen
        ]
        is_transposed = not others and linen is not None and nnx is not None and linen == nnx[::-1]
        return "the transpose would fit" if is_transposed else _same_shape(others)

    def _zero(self, address: Address) -> Entry:
        value, kind = self._values[address], "matched"
        note = "zero in Linen, as NNX has no place for it"
        if self._to_nnx and isinstance(value, Tracer):
            kind, note = "lossy", "it must be zero, which cannot be known while it is traced"
        elif self._to_nnx and not is_unknown(value) and not is_zero(value):
            kind = "lossy"
            note = (
                "not zero, and NNX's GRUCell has no place for it; keep the Linen cell wrapped"
                " with bridge.ToNNX"
            )
        return self._directed(kind, [address], [], "GRUCell", note)

    def _ambiguous(self, found: Ambiguous) -> Entry:
        one = tuple(scope.text for scope in found.candidates)
        other = (nnx_text(found.nnx.path),)
        source, target = (one, other) if self._to_nnx else (other, one)
        return Entry("ambiguous", source, target, note=found.note)

    def _left_over(self) -> Iterator[Entry]:
        modules = {found.nnx.path for found in self._found.ambiguous}
        candidates = {scope.path for found in self._found.ambiguous for scope in found.candidates}
        linked, linked_nnx = self._found.linked
        leaves = [
            node
            for path, node in self._leaves.items()
            if path not in linked_nnx and not _is_below(path, modules)
        ]
        addresses = [
            address
            for address in self._values
            if address not in linked and not _is_below(address[1], candidates)
        ]
        for node in leaves:
            kind, note = self._nnx_only(node, addresses)
            yield self._directed(kind, [], [node], note=note)
        for address in addresses:
            kind, note = self._linen_only(address, leaves)
            yield self._directed(kind, [address], [], note=note)

    def _nnx_only(self, node: NNXNode, addresses: Sequence[Address]) -> tuple[str, str]:
        holder = self._found.nnx.at(node.path[:-2])
        is_scale = holder is not None and holder.is_norm
        if not node.is_variable and not is_scale:
            return "kept", "an array that is not a Variable"
        if node.is_adapter:
            if self._to_nnx:
                return "kept", "a LoRA adapter, which the Linen model does not have"
            if self._adapter_is_idle(node):
                return "kept", "a LoRA adapter without effect: lora_b is zero"
            return "lossy", "the Linen model has no LoRA adapter; merge it into the kernel first"
        around = self._found.nnx.at(node.path[:-1])
        if around is not None and around.computes(node.path[-1]):
            return "kept", "a table that the constructor computes"
        if self._to_nnx and node.collection == CACHE:
            return "kept", "a cache, which Linen does not have"
        same = [
            linen_text(a) for a in addresses if shape_of(self._values[a]) == shape_of(node.value)
        ]
        note = _same_shape(same)
        return ("missing" if self._to_nnx else "unexpected"), note

    def _adapter_is_idle(self, node: NNXNode) -> bool:
        beside = self._leaves.get((*node.path[:-1], "lora_b"))
        return beside is not None and not is_unknown(beside.value) and is_zero(beside.value)

    def _linen_only(self, address: Address, leaves: Sequence[NNXNode]) -> tuple[str, str]:
        if name := self._class_without_counterpart(address):
            return "unsupported", _KEEP_WRAPPED.format(name)
        same = [
            nnx_text(node.path)
            for node in leaves
            if shape_of(self._values[address]) == shape_of(node.value)
        ]
        note = _same_shape(same)
        if address[0] == CACHE:
            if not self._to_nnx:
                return "kept", "a cache, which NNX does not have"
            note = "the cache is created by init_cache of the NNX layer"
        elif empty := [n for n in self._found.nnx.walk() if _is_empty_wrapper(n)]:
            names = ", ".join(n.text or "the model" for n in empty)
            note = f"{names}: a ToNNX without variables, which bridge.lazy_init creates"
        return ("unexpected" if self._to_nnx else "missing"), note

    def _class_without_counterpart(self, address: Address) -> str | None:
        """The Linen class that a leaf belongs to, if NNX has no such class."""
        collection, path = address
        scopes = [self._found.linen.at(path[:n]) for n in range(len(path))]
        names = [without_nnx_class(collection, path, frozenset(s.children)) for s in scopes if s]
        return next((name for name in names if name), None)


def _is_empty_wrapper(node: NNXNode) -> bool:
    return isinstance(node.item, ToNNX) and not node.children


def _same_shape(paths: Sequence[str]) -> str:
    """What a leaf without a counterpart may be meant to be, if that is not just anything."""
    return f"of the same shape: {', '.join(paths)}" if 0 < len(paths) <= 2 else ""


def _is_below(path: Path, prefixes: Set[Path]) -> bool:
    return any(path[:length] in prefixes for length in range(len(path) + 1))


def table(
    entries: Sequence[Entry], heading: str, left_alone: Sequence[str], *, whole: bool = False
) -> str:
    """The entries as a table of fixed width without colours, the problems first.

    `left_alone` has the paths of what is not a weight. With `whole`, every entry gets a row of its
    own, however many there are.
    """
    ordered = sorted(entries, key=_rank)
    rows = [_row(entry) for entry in (ordered if whole else folded_entries(ordered))]
    shown = Table(*_COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown.columns:
        column.overflow = "fold"
    for row in rows:
        shown.add_row(*row)
    body = _text(shown).split("\n")
    if not whole and len(body) > _MOST_LINES:
        left_out = len(body) - _MOST_LINES
        body = [*body[:_MOST_LINES], f" ... {left_out} more lines; {_WHOLE}"]
    lines = [summary(entries, heading), *body]
    if left_alone:
        names = left_alone if whole else folded(left_alone)
        text = f"no weights, left alone: {', '.join(names)}"
        note = textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        lines += note if whole or len(note) <= 10 else [*note[:10], f"  ...; {_WHOLE}"]
    return "\n".join(lines)


def folded_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Fewer entries that say the same: repeated blocks as one, `blocks.{0..11}.fc.kernel`."""
    alike: dict[Any, list[Entry]] = {}
    for entry in entries:
        sides = [folded(x) if len(x) > _ENOUGH else x for x in (entry.source, entry.target)]
        short = dataclasses.replace(entry, source=tuple(sides[0]), target=tuple(sides[1]))
        forms = [[numbered(path).pieces for path in side] for side in (*sides, [entry.rule])]
        key = entry.kind, entry.note, entry.source_shapes, entry.target_shapes, str(forms)
        alike.setdefault(key, []).append(short)
    found: list[Entry] = []
    for first, *others in alike.values():
        row, *more = folded_rows([(*each.source, *each.target) for each in (first, *others)])
        count = len(first.source)
        one = dataclasses.replace(first, source=row[:count], target=row[count:])
        found += [first, *others] if more else [one]
    return found


def problem_texts(entries: Sequence[Entry]) -> list[str]:
    """The entries as lines of an error, folded, and the first of them if there are many."""
    lines = [str(entry) for entry in folded_entries(entries)]
    if len(lines) > _MOST_PROBLEMS:
        left_out = len(lines) - _MOST_PROBLEMS
        lines = [*lines[:_MOST_PROBLEMS], f"... {left_out} more; {_WHOLE}"]
    return lines


def summary(entries: Sequence[Entry], heading: str) -> str:
    """How many entries there are of each kind, in one line."""
    counts = Counter(entry.kind for entry in entries)
    ordered = [*_ORDER, "matched", "kept"]
    parts = [f"{counts[kind]} {kind}" for kind in ordered if counts[kind]] or ["nothing"]
    return f"{heading}: {', '.join(parts)}"


def _row(entry: Entry) -> list[str]:
    how = "; ".join(text for text in (entry.rule, entry.note) if text)
    source, target = _braced(entry.source, "/"), _braced(entry.target, ".")
    return [entry.kind, source, target, _shapes(entry), how]


def _braced(paths: Sequence[str], separator: str) -> str:
    """Paths that differ in one place as one: `cell/{ir,iz,in}/kernel`; else one to a line."""
    separator = "/" if any("/" in path for path in paths) else separator
    return braced(paths, separator) or "\n".join(paths)


def _shapes(entry: Entry) -> str:
    source, target = (
        ", ".join(dict.fromkeys(shapes)) for shapes in (entry.source_shapes, entry.target_shapes)
    )
    return "\n-> ".join(dict.fromkeys(text for text in (source, target) if text))


def _rank(entry: Entry) -> int:
    return _ORDER.index(entry.kind) if entry.kind in _ORDER else len(_ORDER)


def _text(shown: Table) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=_WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
