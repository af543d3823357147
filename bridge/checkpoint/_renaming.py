"""Where the leaves of a checkpoint go by a table of rules, without knowing the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from bridge._conversion.neutral import Path
from bridge._conversion.rules import (
    NUMBER,
    Landing,
    OneWay,
    RulesError,
    StackedLayer,
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
        origin: what it is of the source.
        entry: what it is of the target, None if it is the whole.
    """

    target: ItemPath
    origin: LeafOrigin
    entry: StackedLayer | None


def rename(paths: Iterable[Path], rules: list[OneWay]) -> dict[Path, Path]:
    """The new path by old path.

    Raises:
        RulesError: a rule matches nothing, or is about stacked layers.
    """
    if stacked := [each.rule.linen for each in rules if each.rule.is_stacked]:
        raise RulesError(
            f"stacked layers in the rules for {stacked}",
            "rules that only rename paths, as there is no model",
            "give --model to convert, or use bridge.port",
        )
    unused = {rule.rule.linen for rule in rules}
    keys = [((), path) for path in paths]
    renamed = {key[1]: move.target[1] for key in keys for move in _moves(key, (), rules, unused)}
    _check_used(unused)
    return renamed


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
    rules = read_forward(table) if to_other else read_backward(table)
    first = 0 if source.layout == "nnx" else 1
    shapes = {
        (record.path[:first], record.path[first:]): [s.shape for s in record.stored.values()]
        for record in source.variables.records
    }
    # Numbers are integers in an `nnx.List` and text in an `nnx.Dict`.
    own = {tuple(map(str, path)): path for path in target.leaves}
    placed: dict[Path, Made] = {}
    for (prefix, path), made in origins(shapes, rules).items():
        found = own.get(tuple(map(str, (*prefix, *path))), (*prefix, *nnx_keys(path)))
        if found in placed:
            text = "/".join(map(str, found))
            raise RulesError(
                f"one new path for several leaves: {text}", "one for each", "correct the table"
            )
        placed[found] = made
    return restacked(source, placed)


def origins(shapes: Shapes, rules: list[OneWay]) -> dict[ItemPath, Made]:
    """What each leaf under the new names is made of.

    Args:
        shapes: the shapes of the arrays in every leaf.
        rules: one direction of a table.

    Returns:
        By new path, the leaves or the entries of stacked leaves that it is made of.

    Raises:
        RulesError: a rule matches nothing, two leaves get one path, or entries are missing.
    """
    unused = {rule.rule.linen for rule in rules}
    found: dict[ItemPath, list[_Move]] = {}
    problems: list[str] = []
    for key, own in shapes.items():
        moves = _moves(key, own, rules, unused)
        for move in moves:
            found.setdefault(move.target, []).append(move)
        problems += _left_out(key, moves, own)
    _check_used(unused)
    made: dict[ItemPath, Made] = {}
    for target, moves in found.items():
        by_entry = {move.entry: move.origin for move in moves}
        first = moves[0].entry
        if first is None and len(moves) == 1:
            made[target] = Made(None, [moves[0].origin])
            continue
        whole = (
            [StackedLayer(first.axis, i) for i in range(len(moves))] if first is not None else []
        )
        if by_entry.keys() == set(whole):
            made[target] = Made(whole[0].axis, [by_entry[entry] for entry in whole])
        else:
            problems.append(_collision(target, moves))
    if problems:
        raise RulesError("; ".join(problems), "one place for every leaf", "correct the table")
    return made


def _moves(
    key: ItemPath, shapes: Iterable[tuple[int, ...]], rules: list[OneWay], unused: set[str]
) -> list[_Move]:
    """Where a leaf goes: to one place, or to as many as it has entries."""
    prefix, path = key
    moves = [_Move(key, LeafOrigin((*prefix, *path)), None)]
    # The longest hit comes last.
    for length in range(1, len(path) + 1):
        text = "/".join(map(str, path[:length]))
        hits = [(rule, hit) for rule in rules if (hit := rule.pattern.fullmatch(text))]
        unused -= {rule.rule.linen for rule, _ in hits}
        if not hits:
            continue
        landings = [rule.landing(hit) for rule, hit in hits]
        # The first rule decides; others may name other entries of the same stack.
        if landings[0].number is None:
            del landings[1:]
        moves = [
            move
            for landing in landings
            for move in _of_landing(key, landing, path[length:], shapes)
        ]
    return moves


def _of_landing(
    key: ItemPath, landing: Landing, rest: Path, shapes: Iterable[tuple[int, ...]]
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
            cut = StackedLayer(landing.axis, number)
        new = (*(text.split("/") if text else ()), *rest)
        moves.append(_Move((prefix, new), LeafOrigin((*prefix, *path), cut), landing.entry))
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
    entries = [move.entry for move in moves]
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
