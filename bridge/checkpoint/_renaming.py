"""Places the leaves of a checkpoint by a table of rules, without knowing the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from bridge._conversion.neutral import Path
from bridge._errors import by_reason
from bridge._rules.numbers import folded
from bridge._rules.pieces import (
    LeafShape,
    Piece,
    assembled,
    covers,
    pieces_of,
    without_axis,
)
from bridge._rules.rules import (
    NUMBER,
    UNCHANGED,
    Landing,
    Layer,
    OneWay,
    Route,
    Rule,
    RulesError,
    read_backward,
    read_forward,
)

# A collection, if there are collections, and the path below it.
ItemPath: TypeAlias = tuple[Path, Path]
# The shape of the array in each leaf, None for a leaf of several arrays or none.
Shapes: TypeAlias = Mapping[ItemPath, LeafShape]

_WHOLE = Piece(None, None)


class Made(NamedTuple):
    """What a leaf under its new path is made of.

    Attributes:
        paths: the leaves that it is made of.
        pieces: for each of them, which part of it becomes which part of the new leaf.
        shape: the new shape; None for one leaf as it is, which may be no array.
    """

    paths: Sequence[Path]
    pieces: Sequence[Piece] = (_WHOLE,)
    shape: LeafShape = None

    def array(self, arrays: Iterable[jax.Array], *, to_nnx: bool) -> jax.Array:
        """The new leaf's array.

        The arrays are those of `paths`, which are Linen's with `to_nnx`.
        """
        shape = self.shape or ()
        pairs = zip(self.pieces, arrays, strict=True)
        return assembled([piece.moved(array, shape, to_nnx=to_nnx) for piece, array in pairs])


class _Move(NamedTuple):
    """A leaf, or a part of it, on its way.

    Attributes:
        path: the leaf.
        target: where it goes.
        rule: the rule that says so, None without one.
      part: which of the rule's parts this is.
        cut: which of the layers that are stacked in the leaf this is.
        entry: which of the layers that are stacked in the target it becomes.
    """

    path: Path
    target: ItemPath
    rule: Rule | None = None
    part: int = 0
    cut: Layer | None = None
    entry: Layer | None = None


def placements(
    shapes: Shapes,
    target: Mapping[Path, LeafShape],
    table: Mapping[str, str] | None,
    *,
    to_nnx: bool,
    all_used: bool = True,
) -> dict[Path, Made]:
    """What the leaves of the other side are made of.

    Args:
        shapes: the shape of every leaf; those of Linen's with `to_nnx`.
        target: the shape of each leaf that there is to be, None if it is not an array.
        table: the rules.
        to_nnx: the direction.
        all_used: whether each rule has to match something.

    Returns:
        The leaves by path, with the collection first if there is one. Where the target tells no
        key, numbers are integers for NNX, as an `nnx.List` has them.

    Raises:
        RulesError: a rule matches nothing, two leaves get one path, entries or parts are missing,
            or arrays cannot be stacked, reshaped or split as a rule says.
    """
    rules = read_forward(table or {}) if to_nnx else read_backward(table or {})
    # Numbers are integers in an `nnx.List` and text in an `nnx.Dict`.
    own_paths = {tuple(map(str, path)): path for path in target}
    wanted = {text: target[path] for text, path in own_paths.items()}
    unused = {rule.route.linen for rule in rules}
    found: dict[ItemPath, list[_Move]] = {}
    problems: list[tuple[str, str]] = []
    for key, shape in shapes.items():
        moves = _moves(key, shape, rules, unused)
        for move in moves:
            found.setdefault(move.target, []).append(move)
        if wrong := _left_out(key, moves, shape):
            problems.append((_text(key[1]), wrong))
    if all_used and unused:
        raise RulesError(
            f"{sorted(unused)}, which match no path of the checkpoint",
            f"entries that match its {'Linen' if to_nnx else 'NNX'} paths, as the target is of the"
            " other library",
            "python -m bridge inspect shows the paths",
        )
    pieces, new_shapes = _pieces(found, shapes, wanted, problems, to_nnx)
    placed: dict[Path, Made] = {}
    for (prefix, path), moves in found.items():
        own = [pieces[move] for move in moves if move in pieces]
        if len(own) < len(moves):
            # What is wrong with the others is among the problems.
            continue
        regions = [piece.nnx_region if to_nnx else piece.linen_region for piece in own]
        shape = new_shapes.get((prefix, path))
        text = _text_path((prefix, path))
        new = own_paths.get(text, (*prefix, *nnx_keys(path)) if to_nnx else text)
        if new in placed or not covers(shape or (), regions):
            problems.append((_text(path), _collision(moves)))
        placed[new] = Made([move.path for move in moves], own, shape)
    if problems:
        texts = [f"{where}: {note}" for where, note in by_reason(dict.fromkeys(problems))]
        raise RulesError(texts, "one place for every leaf", "correct the table")
    return placed


def _pieces(
    found: Mapping[ItemPath, list[_Move]],
    shapes: Shapes,
    wanted: Mapping[Path, LeafShape],
    problems: list[tuple[str, str]],
    to_nnx: bool,
) -> tuple[dict[_Move, Piece], dict[ItemPath, LeafShape]]:
    """The piece of every move, and the shapes of the leaves that are made of pieces.

    A rule that only stacks leaves or takes them apart tells the shapes by itself: a leaf that the
    target has in another shape is no problem of the rules.
    """
    sources = {(*prefix, *path): shape for (prefix, path), shape in shapes.items()}
    pieces: dict[_Move, Piece] = {}
    groups: dict[tuple[Rule, Any, Layer | None, Layer | None], list[_Move]] = {}
    for move in (move for moves in found.values() for move in moves):
        if move.rule is None or (move.rule.form, move.cut, move.entry) == (UNCHANGED, None, None):
            pieces[move] = _WHOLE
            continue
        # The parts of a fused leaf belong together.
        fused = move.rule.form.fused
        is_split = fused == ("linen" if to_nnx else "nnx")
        whole = move.path if is_split else move.target if fused else move[:2]
        groups.setdefault((move.rule, whole, move.cut, move.entry), []).append(move)
    new_shapes: dict[ItemPath, LeafShape] = {}
    for (rule, _, cut, entry), moves in groups.items():
        moves.sort(key=lambda move: move.part)
        names = " and ".join(_text(move.target[1]) for move in moves)
        given = [sources[move.path] for move in moves]
        form = rule.form
        if form == UNCHANGED:
            targets = [
                _stacked(without_axis(shape, cut), entry, found[move.target])
                for move, shape in zip(moves, given, strict=True)
            ]
        else:
            targets = [wanted.get(_text_path(move.target)) for move in moves]
        for move, shape in zip(moves, targets, strict=True):
            new_shapes.setdefault(move.target, shape)
        targets = [new_shapes[move.target] for move in moves]
        if form != UNCHANGED and len(moves) != len(rule.routes):
            count = f"{len(moves)} leaves for the {len(rule.routes)} parts"
            problems.append((names, f"{count} of the rule for {rule.linen!r}"))
            continue
        if form != UNCHANGED:
            absent = [move.target for move in moves if _text_path(move.target) not in wanted]
            problems += [_not_there(target, wanted) for target in absent]
            if absent:
                continue
        own = (
            pieces_of(given, targets, (cut, entry), form)
            if to_nnx
            else pieces_of(targets, given, (entry, cut), form)
        )
        if isinstance(own, str):
            problems.append((names, own))
        else:
            pieces |= zip(moves, own, strict=True)
    return pieces, new_shapes


def _stacked(shape: LeafShape, entry: Layer | None, moves: Sequence[_Move]) -> LeafShape:
    """The shape of a leaf that these leaves go to, from the one entry that has a shape."""
    if shape is None or entry is None:
        return shape
    axis = entry.axis % (len(shape) + 1)
    count = 1 + max(move.entry.number for move in moves if move.entry is not None)
    return (*shape[:axis], count, *shape[axis:])


def _text(path: Path) -> str:
    return "/".join(map(str, path))


def _text_path(target: ItemPath) -> Path:
    return tuple(map(str, (*target[0], *target[1])))


def _moves(key: ItemPath, shape: LeafShape, rules: list[OneWay], unused: set[str]) -> list[_Move]:
    """Where a leaf goes: to one place, or to as many as it has entries."""
    prefix, path = key
    moves = [_Move((*prefix, *path), key)]
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
        moves = [move for each in landings for move in _of_landing(key, *each, rest, shape)]
    return moves


def _of_landing(
    key: ItemPath, route: Route, landing: Landing, rest: Path, shape: LeafShape
) -> list[_Move]:
    prefix, path = key
    if landing.axis is None:
        numbers: list[int | None] = [None]
    elif landing.number is not None:
        numbers = [landing.number]
    else:
        numbers = [*range(_total(shape, landing.axis))]
    if landing.entry is not None and shape is not None and not route.rule.form.is_reshaped:
        rank = len(shape) + (landing.axis is None)
        numbers = numbers if -rank <= landing.entry.axis < rank else []
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
        leaf = (*prefix, *path)
        moves.append(_Move(leaf, (prefix, new), route.rule, route.part, cut, landing.entry))
    return moves


def _total(shape: LeafShape, axis: int) -> int:
    """How many entries are stacked on an axis; none if there is no such axis."""
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else 0


def _left_out(key: ItemPath, moves: list[_Move], shape: LeafShape) -> str:
    """What is wrong with the entries that are taken of one leaf; empty if nothing is."""
    if not moves:
        found = "it is not one array" if shape is None else f"its shape is {shape}"
        return f"no axis of stacked layers that a rule asks for: {found}"
    cuts = [move.cut for move in moves]
    if cuts[0] is None:
        return ""
    taken = {cut.number for cut in cuts if cut is not None}
    lacking = sorted({*range(_total(shape, cuts[0].axis))} ^ taken)
    return f"the layers {lacking} have no place or do not exist" if lacking else ""


def _not_there(target: ItemPath, wanted: Iterable[Path]) -> tuple[str, str]:
    path = _text_path(target)
    depth, there = departure(path, wanted)
    note = f"not in the target, which has {', '.join(folded(there))} there"
    return _text(path[len(target[0]) : depth + 1]), note


def departure(path: Path, known: Iterable[Path]) -> tuple[int, list[str]]:
    """At which of its keys a path leaves others, and what these have in the place of that key."""
    depth, below = 0, list(known)
    while inside := [own for own in below if own[: depth + 1] == path[: depth + 1]]:
        depth, below = depth + 1, inside
    return depth, list(dict.fromkeys(own[depth] for own in below if len(own) > depth))


def _collision(moves: list[_Move]) -> str:
    numbers = sorted(move.entry.number for move in moves if move.entry is not None)
    if len(numbers) < len(moves):
        sources = ", ".join(_text(move.path) for move in moves)
        return f"one new path for several leaves, {sources}"
    lacking = sorted({*range(max(len(numbers), max(numbers) + 1))}.difference(numbers))
    return f"the layers {numbers}, each once and on one axis; missing are {lacking}"


def nnx_keys(path: Path) -> Path:
    """Keys as NNX has them: those of an `nnx.List` are integers."""
    return tuple(int(key) if str(key).isdecimal() else key for key in path)
