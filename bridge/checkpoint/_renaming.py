"""Finds the leaves of a checkpoint for the leaves of a target of the other library, by rules.

The paths of both sides are known, so rules are always followed from Linen to NNX.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Path
from bridge._errors import by_reason
from bridge._rules.numbers import folded
from bridge._rules.pieces import LeafShape, Piece, covers, pieces_of, without_axis
from bridge._rules.rules import UNCHANGED, Layer, Route, Rule, RulesError, rules_of

from ._source import Source, departure
from ._stored import Recipe, Record
from ._targets import TargetTree

# What no rule is for, such as the collection, and the path below it, both as text.
ItemPath: TypeAlias = tuple[Path, Path]
Shapes: TypeAlias = Mapping[ItemPath, LeafShape]
# The path that a leaf of a target has in the checkpoint, and the shape of its array.
Wanted: TypeAlias = tuple[Path, LeafShape]


class _Link(NamedTuple):
    """A leaf of the checkpoint, or a part of it, and the leaf that it becomes, or a part of it.

    Attributes:
      old: the leaf of the checkpoint.
      new: the leaf of the target.
      layers: which of several stacked layers of the two is meant.
      rule: the rule that links them, None without one.
      part: which of the rule's parts this is.
    """

    old: ItemPath
    new: ItemPath
    layers: tuple[Layer | None, Layer | None] = (None, None)
    rule: Rule | None = None
    part: int = 0


def for_target(source: Source, target: TargetTree | None, table: Mapping[str, str]) -> Source:
    """A checkpoint with the paths of a target of the other library, which says the direction.

    Raises RulesError if a rule matches nothing or cannot be followed.
    """
    if target is None:
        raise RulesError("no target", "one of the other library", "give it, or leave rules out")
    first = 0 if source.layout == "nnx" else 1
    records = {split_at(record.path, first): record for record in source.variables}
    if len(records) < len(source.variables):
        problem = "keys that differ only in being a number or text"
        raise RulesError(problem, "keys that differ as text", "leave rules out")
    wanted = {
        split_at(own, first): (own, shape_of(target.leaves[path].value))
        for path, own in paths_in(source, target).items()
    }
    to_nnx = target.side == "nnx"
    variables = renamed(source, records, wanted, table, to_nnx=to_nnx)
    return dataclasses.replace(source, variables=variables)


def paths_in(source: Source, target: TargetTree) -> dict[Path, Path]:
    """The path that each leaf of a target has in a checkpoint, whether or not it is there."""
    is_by_path = source.layout == "nnx" or source.is_params_alone
    nnx_paths = target.nnx_paths() if is_by_path and target.side != "pytree" else {}
    start = ("params",) if source.is_params_alone else ()
    return {p: (*start, *nnx_paths[p]) if p in nnx_paths else p for p in target.leaves}


def split_at(path: Path, first: int) -> ItemPath:
    """A path as text, in two."""
    texts = tuple(map(str, path))
    return texts[:first], texts[first:]


def renamed(
    source: Source,
    records: Mapping[ItemPath, Record],
    target: Mapping[ItemPath, Wanted],
    table: Mapping[str, str] | None,
    *,
    to_nnx: bool,
    all_used: bool = True,
) -> list[Record]:
    """The leaves of a tree of a checkpoint at the paths of a target, made of others by the rules.

    Leaves without a place keep their paths. With `all_used`, each rule has to match something.
    Raises RulesError if it does not, two leaves get one path, layers or parts are missing, or
    arrays cannot be stacked, reshaped or split as a rule says.
    """
    given = {key: shape_in(record) for key, record in records.items()}
    wanted = {key: shape for key, (_, shape) in target.items()}
    problems: list[tuple[str, str]] = []
    links, unused = _links(given, wanted, rules_of(table or {}), problems, to_nnx)
    if all_used and unused:
        raise RulesError(
            f"{unused}, which match no path of the checkpoint",
            f"entries that match its {'Linen' if to_nnx else 'NNX'} paths, as the target is of the"
            " other library",
            "python -m bridge inspect shows the paths",
        )
    pieces, made = _pieces(links, given, wanted, problems, to_nnx)
    by_old: dict[ItemPath, list[_Link]] = {}
    by_new: dict[ItemPath, list[_Link]] = {}
    for link in links:
        by_old.setdefault(link.old, []).append(link)
        by_new.setdefault(link.new, []).append(link)
    for is_new, shapes, by_key in ((False, given, by_old), (True, made, by_new)):
        for key, own in by_key.items():
            parts = [pieces[link] for link in own if link in pieces]
            is_nnx = is_new == to_nnx
            regions = [piece.nnx_region if is_nnx else piece.linen_region for piece in parts]
            # What is wrong with a link without a piece is among the problems.
            if len(parts) == len(own) and not covers(shapes.get(key) or (), regions):
                problems.append((_text(key[1]), _collision(own, shapes.get(key), is_new)))
    if problems:
        texts = [f"{where}: {note}" for where, note in by_reason(dict.fromkeys(problems))]
        raise RulesError(texts, "one place for every leaf", "correct the table")
    found: list[Record] = []
    for key, record in records.items():
        if key not in by_old:
            found.append(_at(source, (*key[0], *key[1]), [record], [], None, to_nnx))
    for key, own in by_new.items():
        path = target[key][0] if key in target else (*key[0], *key[1])
        origins = [records[link.old] for link in own]
        recipe = [pieces[link] for link in own] if key in made else []
        found.append(_at(source, path, origins, recipe, made.get(key), to_nnx))
    return found


def shape_in(record: Record) -> LeafShape:
    """The shape of the array that a leaf has; None if it has several, or none."""
    shapes = [None if s.is_python else s.shape for s in record.stored.values()]
    return shapes[0] if len(shapes) == 1 else None


def _at(
    source: Source,
    path: Path,
    origins: Sequence[Record],
    pieces: Sequence[Piece],
    shape: LeafShape,
    to_nnx: bool,
) -> Record:
    """A leaf at another path: as it is, or made of pieces of several, with a shape."""
    first = origins[0]
    length, own = len(source.names(first.path)), source.names(path)
    stored = {(*own, *names[length:]): array for names, array in first.stored.items()}
    if shape is not None:
        arrays = tuple(next(iter(record.stored.values())) for record in origins)
        dtypes = sorted({array.dtype for array in arrays})
        if len(dtypes) > 1:
            text = f"{_text(path)}, made of {' and '.join(dtypes)}"
            raise RulesError(text, "arrays of one dtype", "correct the table")
        ((names, array),) = stored.items()
        recipe, location = Recipe(arrays, tuple(pieces), to_nnx), ("made", *names)
        stored[names] = dataclasses.replace(
            array, shape=shape, location=location, digest=None, recipe=recipe
        )
    return dataclasses.replace(first, path=path, stored=stored)


def _links(
    given: Shapes,
    target: Shapes,
    rules: Sequence[Rule],
    problems: list[tuple[str, str]],
    to_nnx: bool,
) -> tuple[list[_Link], list[str]]:
    """What the leaves of the checkpoint become, and the rules that match none of them."""
    linen, nnx = (given, target) if to_nnx else (target, given)
    prefixes = {prefix for prefix, _ in target}
    routes = [route for rule in rules for route in rule.routes]
    unused = {route.linen for route in routes}
    links: list[_Link] = []
    for key, shape in linen.items():
        prefix, path = key
        hits = [
            (length, route, hit)
            for length, text in enumerate(itertools.accumulate(path, "{}/{}".format), start=1)
            for route in routes
            if (hit := route.pattern.fullmatch(text))
        ]
        # The longest path that a rule matches decides, and the first rule for it.
        longest = hits[-1][0] if hits else 0
        rule = next((route.rule for length, route, _ in hits if length == longest), None)
        own = [_Link(key, key)] if rule is None and prefix in prefixes else []
        for length, route, hit in hits:
            if to_nnx or (length, route.rule) != (longest, rule):
                unused.discard(route.linen)
            # The target may have no such collection, or no moments of this kind.
            if (length, route.rule) == (longest, rule) and prefix in prefixes:
                linked = _by_rule(route, hit, key, path[length:], shape)
                own += linked
                if not linked:
                    problems.append((_text(path), _no_axis(shape)))
        for link in own:
            # Other writers make a box or a Variable a mapping with one key.
            own_path = link.new[1]
            has_key = to_nnx and own_path[-1:] == ("value",)
            names = own_path, own_path[:-1] if has_key else (*own_path, "value")
            there = next(((prefix, name) for name in names if (prefix, name) in nnx), None)
            entry = link.layers[1]
            if to_nnx:
                links.append(link._replace(new=there or link.new))
            elif there and (entry is None or entry.number < _size(nnx[there], entry.axis)):
                links.append(link._replace(old=there, new=key, layers=link.layers[::-1]))
                unused -= {route.linen for _, route, _ in hits if route.rule is rule}
    return links, sorted(unused)


def _by_rule(
    route: Route, hit: re.Match[str], key: ItemPath, rest: Path, shape: LeafShape
) -> list[_Link]:
    """The links of a Linen leaf by a rule: one, or one for each layer that is stacked in it."""
    segments = route.target(hit)
    star = next((segment for segment in segments if segment.name is None), None)
    entry = next((Layer(s.axis, int(s.number)) for s in segments if s.number is not None), None)
    numbers = [None] if star is None else range(_size(shape, star.axis))
    links: list[_Link] = []
    for number in numbers:
        layer = Layer(star.axis, number) if star and number is not None else None
        text = "/".join(str(number) if s.name is None else s.name for s in segments)
        path = (*(text.split("/") if text else ()), *rest)
        links.append(_Link(key, (key[0], path), (layer, entry), route.rule, route.part))
    return links


def _pieces(
    links: Sequence[_Link],
    given: Shapes,
    target: Shapes,
    problems: list[tuple[str, str]],
    to_nnx: bool,
) -> tuple[dict[_Link, Piece], dict[ItemPath, LeafShape]]:
    """The piece of every link that can be followed, and the shapes of leaves made of pieces.

    A rule that only stacks leaves or takes them apart tells the shapes by itself: a leaf that the
    target has in another shape is no problem of the rules.
    """
    pieces: dict[_Link, Piece] = {}
    made: dict[ItemPath, LeafShape] = {}
    groups: dict[object, list[_Link]] = {}
    counts: dict[ItemPath, int] = {}
    for link in links:
        form = link.rule.form if link.rule else UNCHANGED
        if form == UNCHANGED and link.layers == (None, None):
            pieces[link] = Piece(None, None)
            continue
        # The parts of a fused leaf belong together.
        is_split = form.fused == ("linen" if to_nnx else "nnx")
        whole = link[:2] if form.fused is None else link.old if is_split else link.new
        groups.setdefault((link.rule, whole, link.layers), []).append(link)
        if link.layers[1]:
            counts[link.new] = max(counts.get(link.new, 0), link.layers[1].number + 1)
    for own in groups.values():
        own.sort(key=lambda link: link.part)
        _, new, (layer, entry), rule, _ = own[0]
        names = " and ".join(_text(link.new[1]) for link in own)
        old_shapes = [given[link.old] for link in own]
        if rule is None or rule.form == UNCHANGED:
            inner = without_axis(old_shapes[0], layer)
            if inner and entry and not -len(inner) - 1 <= entry.axis <= len(inner):
                problems.append((_text(own[0].old[1]), _no_axis(inner)))
                continue
            new_shapes = [_stacked(inner, entry, counts.get(new, 0))]
        elif len(own) != len(rule.routes):
            count = f"{len(own)} leaves for the {len(rule.routes)} parts"
            problems.append((names, f"{count} of the rule for {rule.linen!r}"))
            continue
        elif absent := [link.new for link in own if link.new not in target]:
            problems += [_not_there(key, target) for key in absent]
            continue
        else:
            new_shapes = [target[link.new] for link in own]
        zipped = zip(own, new_shapes, strict=True)
        new_shapes = [made.setdefault(link.new, shape) for link, shape in zipped]
        form = rule.form if rule else UNCHANGED
        found = (
            pieces_of(old_shapes, new_shapes, (layer, entry), form)
            if to_nnx
            else pieces_of(new_shapes, old_shapes, (entry, layer), form)
        )
        if isinstance(found, str):
            problems.append((names, found))
        else:
            pieces |= zip(own, found, strict=True)
    return pieces, made


def _size(shape: LeafShape, axis: int) -> int:
    """How many layers are stacked on an axis; none if there is no such axis."""
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else 0


def _stacked(shape: LeafShape, layer: Layer | None, count: int) -> LeafShape:
    """The shape of a leaf in which so many of a shape are stacked."""
    if shape is None or layer is None:
        return shape
    axis = layer.axis % (len(shape) + 1)
    return (*shape[:axis], count, *shape[axis:])


def _no_axis(shape: LeafShape) -> str:
    found = "it is not one array" if shape is None else f"its shape is {shape}"
    return f"no axis of stacked layers that a rule asks for: {found}"


def _not_there(key: ItemPath, target: Iterable[ItemPath]) -> tuple[str, str]:
    path = (*key[0], *key[1])
    depth, there = departure(path, ((*prefix, *own) for prefix, own in target))
    note = f"not in the target, which has {', '.join(folded(there))} there"
    return _text(path[len(key[0]) : depth + 1]), note


def _collision(links: Sequence[_Link], shape: LeafShape, is_new: bool) -> str:
    """What is wrong with links that do not make up a leaf of the target, or of the checkpoint."""
    layers = [layer for link in links if (layer := link.layers[is_new])]
    numbers = sorted({layer.number for layer in layers})
    if len(numbers) < len(links):
        others = ", ".join(_text((link.old if is_new else link.new)[1]) for link in links)
        return f"{'one new path for several leaves' if is_new else 'several new paths'}, {others}"
    total = max(numbers[-1] + 1, *(_size(shape, layer.axis) for layer in layers))
    lacking = sorted({*range(total)}.difference(numbers))
    return f"the layers {numbers}, each once and on one axis; missing are {lacking}"


def _text(path: Path) -> str:
    return "/".join(map(str, path))
