"""Places the leaves of a checkpoint by a table of rules, without knowing the model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Path
from bridge._rules.pieces import LeafShape, Piece, covers, pieces_of, target_shapes
from bridge._rules.rules import (
    NUMBER,
    UNCHANGED,
    Form,
    Landing,
    Layer,
    OneWay,
    Route,
    RulesError,
    read_backward,
    read_forward,
)

from ._restacking import LeafOrigin, Made, restacked
from ._source import Source
from ._targets import TargetTree

# A collection, if there are collections, and the path below it.
ItemPath: TypeAlias = tuple[Path, Path]
# The shapes of the arrays in each leaf; most have one.
Shapes: TypeAlias = Mapping[ItemPath, Iterable[tuple[int, ...]]]


class _Move(NamedTuple):
    """One part of a leaf on its way.

    Attributes:
        target: where it goes.
        origin: what it is of the source, and what of the target.
        route: the rule that says so, None without one.
    """

    target: ItemPath
    origin: LeafOrigin
    route: Route | None = None

    @property
    def form(self) -> Form:
        """How the arrays differ."""
        return UNCHANGED if self.route is None else self.route.rule.form


def unmatched(patterns: Iterable[str]) -> RulesError:
    """The error for expressions that match nothing."""
    return RulesError(
        f"{sorted(patterns)}, which match no path of the checkpoint",
        "entries that match something",
        "python -m bridge inspect shows the paths",
    )


def for_target(source: Source, target: TargetTree | None, table: Mapping[str, str]) -> Source:
    """A checkpoint whose model's paths are those of a target of the other side.

    Raises:
        RulesError: a rule cannot be followed, both sides are of one library, two leaves get one
            path, or layers that are to be stacked are not all there.
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
    first = 0 if source.layout == "nnx" else 1
    shapes = {
        (record.path[:first], record.path[first:]): [s.shape for s in record.stored.values()]
        for record in source.variables.records
    }
    wanted = {path: shape_of(leaf.value) for path, leaf in target.leaves.items()}
    placed = placements(shapes, wanted, table, to_nnx=to_other)
    variables = restacked(source, source.variables, placed, to_nnx=to_other)
    return dataclasses.replace(source, variables=variables)


def placements(
    shapes: Shapes,
    target: Mapping[Path, tuple[int, ...] | None] | None,
    table: Mapping[str, str],
    *,
    to_nnx: bool,
) -> dict[Path, Made]:
    """What the leaves of the other side are made of.

    Args:
        shapes: as for `origins`.
        target: the shape of each leaf that there is to be, None if it is no array; None if nothing
            is known of them.
        table: the rules.
        to_nnx: whether the shapes are those of Linen's leaves.

    Returns:
        By path, with the collection first if there is one. Where the target tells no key, numbers
        are integers for NNX, as an `nnx.List` has them.

    Raises:
        RulesError: as `origins`; or only a target would tell the result of a rule.
    """
    rules = read_forward(table) if to_nnx else read_backward(table)
    # Numbers are integers in an `nnx.List` and text in an `nnx.Dict`.
    own = {tuple(map(str, path)): path for path in target or {}}
    wanted = None if target is None else {text: target[path] for text, path in own.items()}
    placed: dict[Path, Made] = {}
    for (prefix, path), made in origins(shapes, wanted, rules, to_nnx=to_nnx).items():
        text = tuple(map(str, (*prefix, *path)))
        found = own.get(text, (*prefix, *nnx_keys(path)) if to_nnx else text)
        if found in placed:
            raise RulesError(
                f"one new path for several leaves: {'/'.join(text)}",
                "one for each",
                "correct the table",
            )
        placed[found] = made
    return placed


def origins(
    shapes: Shapes,
    wanted: Mapping[Path, tuple[int, ...] | None] | None,
    rules: list[OneWay],
    *,
    to_nnx: bool,
    all_used: bool = True,
) -> dict[ItemPath, Made]:
    """What each leaf under the new names is made of.

    Args:
        shapes: the shapes of the arrays in every leaf.
        wanted: the shape of each leaf of the target by its path as text, None if it is no array;
            None without a target, where the shapes of the leaves have to tell those of the result.
        rules: one direction of a table.
        to_nnx: which direction.
        all_used: whether each rule has to match something.

    Returns:
        By new path, the leaves or the entries of stacked leaves that it is made of.

    Raises:
        RulesError: a rule matches nothing, two leaves get one path, entries or parts are missing,
            arrays cannot be reshaped or split as a rule says, or only a target would tell how.
    """
    if wanted is None:
        _check_told(rules, to_nnx)
    unused = {rule.route.linen for rule in rules}
    found: dict[ItemPath, list[_Move]] = {}
    problems: list[str] = []
    for key, own in shapes.items():
        moves = _moves(key, own, rules, unused)
        for move in moves:
            found.setdefault(move.target, []).append(move)
        problems += _left_out(key, moves, own)
    if all_used:
        _check_used(unused)
    pieces, derived = _pieces(found, shapes, wanted, problems, to_nnx)
    made: dict[ItemPath, Made] = {}
    for target, moves in found.items():
        by_entry = {move.origin.entry: move.origin for move in moves}
        first = moves[0].origin.entry
        shape = (derived if wanted is None else wanted).get(_text_path(target))
        if moves[0].form != UNCHANGED:
            own = [pieces[move] for move in moves if move in pieces]
            regions = [piece.nnx_region if to_nnx else piece.linen_region for piece in own]
            if len(own) == len(moves) and shape is not None and covers(shape, regions):
                origins = [m.origin._replace(piece=p) for m, p in zip(moves, own, strict=True)]
                made[target] = Made(origins, shape)
            elif len(own) == len(moves):
                problems.append(_collision(target, moves))
        elif first is None and len(moves) == 1:
            made[target] = Made([moves[0].origin])
        else:
            whole = [first._replace(number=i) for i in range(len(moves))] if first else []
            if by_entry.keys() == set(whole):
                made[target] = Made([by_entry[entry] for entry in whole])
            else:
                problems.append(_collision(target, moves))
    if problems:
        raise RulesError("; ".join(problems), "one place for every leaf", "correct the table")
    return made


def _pieces(
    found: Mapping[ItemPath, list[_Move]],
    shapes: Shapes,
    wanted: Mapping[Path, tuple[int, ...] | None] | None,
    problems: list[str],
    to_nnx: bool,
) -> tuple[dict[_Move, Piece], dict[Path, LeafShape]]:
    """The pieces of the leaves that rules reshape, transpose, split or join; and their new shapes.

    The shapes are those that no target tells.
    """
    arrays = {(*a, *b): own[0] for (a, b), each in shapes.items() if len(own := [*each]) == 1}
    groups: dict[Any, list[_Move]] = {}
    for move in (move for moves in found.values() for move in moves):
        if move.route is not None and move.form != UNCHANGED:
            is_split = move.form.fused == ("linen" if to_nnx else "nnx")
            fused = move.origin.path if is_split else move.target
            key = move.route.rule, fused, move.origin.cut, move.origin.entry
            groups.setdefault(key, []).append(move)
    pieces: dict[_Move, Piece] = {}
    derived: dict[Path, LeafShape] = {}
    for (rule, *_), moves in groups.items():
        moves.sort(key=lambda move: move.route.part if move.route else 0)
        texts = ", ".join("/".join(map(str, move.target[1])) for move in moves)
        sources = [arrays.get(move.origin.path) for move in moves]
        if wanted is None:
            told = target_shapes(sources, moves[0].origin.cut, rule.form, to_nnx=to_nnx)
            counts = [len({move.origin.entry for move in found[move.target]}) for move in moves]
            derived |= {
                _text_path(move.target): _stacked(shape, move.origin.entry, count)
                for move, shape, count in zip(moves, told or (), counts, strict=False)
            }
        known = derived if wanted is None else wanted
        targets = [known.get(_text_path(move.target)) for move in moves]
        layers = moves[0].origin.cut, moves[0].origin.entry
        if len(moves) != len(rule.routes):
            count = f"{len(moves)} leaves for the {len(rule.routes)} parts"
            problems.append(f"{count} of the rule for {rule.linen!r}: {texts}")
            continue
        own = (
            pieces_of(sources, targets, layers, rule.form)
            if to_nnx
            else pieces_of(targets, sources, (layers[1], layers[0]), rule.form)
        )
        if isinstance(own, str):
            problems.append(f"{texts}, where {own}")
        else:
            pieces |= zip(moves, own, strict=True)
    return pieces, derived


def _stacked(shape: LeafShape, entry: Layer | None, count: int) -> LeafShape:
    """The shape of leaves of which one entry has a shape."""
    if shape is None or entry is None:
        return shape
    axis = entry.axis % (len(shape) + 1)
    return (*shape[:axis], count, *shape[axis:])


def _check_told(rules: list[OneWay], to_nnx: bool) -> None:
    """Raises an error for rules whose results only a target tells."""
    own = {each.route.rule.linen: each.route.rule.form for each in rules}
    is_split = {name: form.fused == ("linen" if to_nnx else "nnx") for name, form in own.items()}
    open_rules = [
        f"a {'split' if is_split[name] else 'reshape'} in the rule for {name!r}"
        for name, form in own.items()
        if is_split[name] or form.is_reshaped
    ]
    if open_rules:
        raise RulesError(
            "; ".join(open_rules),
            "rules of which shapes tell the result, as there is no model",
            "give --model to convert, or use bridge.port",
        )


def _text_path(target: ItemPath) -> Path:
    return tuple(map(str, (*target[0], *target[1])))


def _moves(
    key: ItemPath, shapes: Iterable[tuple[int, ...]], rules: list[OneWay], unused: set[str]
) -> list[_Move]:
    """Where a leaf goes: to one place, or to as many as it has entries."""
    prefix, path = key
    moves = [_Move(key, LeafOrigin((*prefix, *path)))]
    # The longest hit comes last.
    for length in range(1, len(path) + 1):
        text = "/".join(map(str, path[:length]))
        hits = [(rule, hit) for rule in rules if (hit := rule.pattern.fullmatch(text))]
        unused -= {rule.route.linen for rule, _ in hits}
        if not hits:
            continue
        landings = [(rule.route, rule.landing(hit)) for rule, hit in hits]
        # The first rule decides; others may name other entries of the same stack.
        (first, landing), rest = landings[0], path[length:]
        if landing.number is None:
            landings = [each for each in landings if each[0].rule is first.rule]
        moves = [move for each in landings for move in _of_landing(key, *each, rest, shapes)]
    return moves


def _of_landing(
    key: ItemPath,
    route: Route,
    landing: Landing,
    rest: Path,
    shapes: Iterable[tuple[int, ...]],
) -> list[_Move]:
    prefix, path = key
    if landing.axis is None:
        numbers: list[int | None] = [None]
    elif landing.number is not None:
        numbers = [landing.number]
    else:
        numbers = [*range(_total(shapes, landing.axis))]
    moves: list[_Move] = []
    for number in numbers:
        text = landing.template
        cut = None
        if number is not None and landing.axis is not None:
            if not re.fullmatch(landing.admits, str(number)):
                continue
            text = text.replace(NUMBER, str(number))
            cut = Layer(landing.axis, number)
        new = (*(text.split("/") if text else ()), *rest)
        origin = LeafOrigin((*prefix, *path), cut, landing.entry)
        moves.append(_Move((prefix, new), origin, route))
    return moves


def _total(shapes: Iterable[tuple[int, ...]], axis: int) -> int:
    """How many entries are stacked on an axis; none if there is no such axis."""
    sizes = {shape[axis] if -len(shape) <= axis < len(shape) else 0 for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else 0


def _left_out(key: ItemPath, moves: list[_Move], shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """What is wrong with the entries that are taken of one leaf."""
    text = "/".join(map(str, key[1]))
    if not moves:
        return [f"{text}, which has no axis of stacked layers, under a rule for them"]
    cuts = [move.origin.cut for move in moves]
    if cuts[0] is None:
        return []
    taken = {cut.number for cut in cuts if cut is not None}
    lacking = sorted({*range(_total(shapes, cuts[0].axis))} ^ taken)
    return [f"{text}, whose layers {lacking} have no place or do not exist"] if lacking else []


def _collision(target: ItemPath, moves: list[_Move]) -> str:
    text = "/".join(map(str, target[1]))
    sources = ", ".join("/".join(map(str, move.origin.path)) for move in moves)
    entries = [move.origin.entry for move in moves]
    if None in entries:
        return f"one new path for several leaves: {text} for {sources}"
    numbers = sorted(entry.number for entry in entries if entry is not None)
    wanted = set(range(max(len(numbers), max(numbers) + 1)))
    lacking = sorted(wanted.difference(numbers))
    return f"the layers {numbers} of {text}, each once and on one axis; missing are {lacking}"


def _check_used(unused: set[str]) -> None:
    if unused:
        raise unmatched(unused)


def nnx_keys(path: Path) -> Path:
    """Keys as NNX has them: those of an `nnx.List` are integers."""
    return tuple(int(key) if str(key).isdecimal() else key for key in path)
