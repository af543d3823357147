"""Layers that one side keeps stacked and the other one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from bridge._conversion.arrays import shape_of
from bridge._rules.rules import Layer

from ._correspondence import PLAIN, Context
from ._numbers import families, sequence
from ._sequences import counts_constructions
from ._structure import (
    Place,
    core,
    matches,
    open_nodes,
    shapes,
    signature,
)
from ._trees import LinenNode, NNXNode

Stack: TypeAlias = list[tuple[NNXNode, LinenNode, Context]]
LeafStack: TypeAlias = tuple[NNXNode, LinenNode, int, Stack]


def list_pairs(
    node: NNXNode, scope: LinenNode, context: Context, *, only_first: bool = False
) -> Stack:
    """The items of an NNX list, each with its layer of a scope of stacked leaves."""
    total, at = len(node.children), len(node.path)
    keys = sorted(node.children)[: 1 if only_first else None]
    return [
        (node.children[key], scope, context._replace(linen=Layer(0, number, total, at)))
        for number, key in enumerate(keys)
    ]


def stack_pairs(node: NNXNode, scopes: Sequence[LinenNode], context: Context) -> Stack:
    """The layers of an NNX module of stacked leaves, each with its scope."""
    total, at = len(scopes), len(node.path) - 1
    return [
        (node, scope, context._replace(nnx=Layer(0, number, total, at)))
        for number, scope in enumerate(scopes)
    ]


def leaf_stacks(place: Place) -> list[LeafStack]:
    """The open leaves that one side has stacked, and the other one by one, by shape.

    Returns:
      (NNX leaf, Linen leaf, an axis that fits, the pairs of layers); the first of several.
    """
    if place.context != PLAIN:
        return []
    return [*_leaves_of_lists(place), *_stacked_leaves(place)]


def _leaves_of_lists(place: Place) -> Iterator[LeafStack]:
    scopes = [s for s in place.linen.walk() if s.leaves and place.settled.is_free(s, PLAIN)]
    for node in place.nnx.walk():
        if node.is_leaf or not node.is_container or not is_list(node) or len(node.children) < 2:
            continue
        items = [node.children[key] for key in sorted(node.children)]
        for leaf in items[0].walk():
            own = [item.at(leaf.path[len(items[0].path) :]) for item in items]
            same = [each for each in own if each is not None and _is_open_leaf(each, place)]
            if len(same) < len(items):
                continue
            for scope in scopes:
                layers = [
                    (each, scope, Context(linen=Layer(0, n, len(same), len(node.path))))
                    for n, each in enumerate(same)
                ]
                yield from _fitting(layers)


def _stacked_leaves(place: Place) -> Iterator[LeafStack]:
    scopes = [s for s in place.linen.walk() if s.leaves and place.settled.is_free(s, PLAIN)]
    by_text = {scope.text: scope for scope in scopes}
    for texts in families(by_text).values():
        own = [by_text[text] for text in texts]
        if len(own) < 2 or sequence(texts) is None or counts_constructions(own):
            continue
        for leaf in place.nnx.walk():
            if _is_open_leaf(leaf, place):
                at = len(leaf.path) - 1
                layers = [
                    (leaf, scope, Context(nnx=Layer(0, n, len(own), at)))
                    for n, scope in enumerate(own)
                ]
                yield from _fitting(layers)


def _is_open_leaf(node: NNXNode, place: Place) -> bool:
    is_weight = node.is_leaf and node.is_variable and not node.is_adapter
    return is_weight and place.settled.is_free(node, place.context)


def _fitting(layers: Stack) -> Iterator[LeafStack]:
    """A stack of leaves on each axis on which all of its shapes fit."""
    node, scope, _ = layers[0]
    values = [*scope.arrays.values(), node.value]
    for axis in range(max(len(shape_of(value) or ()) for value in values)):
        there = [on_axis(layer, axis) for layer in layers]
        if all(shapes(n, c) == shapes(s, c) for n, s, c in there):
            yield node, scope, axis, there


def on_axis(
    pair: tuple[NNXNode, LinenNode, Context], axis: int
) -> tuple[NNXNode, LinenNode, Context]:
    """A pair of a stack, stacked on another axis."""
    node, scope, context = pair
    linen = context.linen and context.linen._replace(axis=axis)
    own = context.nnx and context.nnx._replace(axis=axis)
    return node, scope, Context(linen, own)


def is_list(node: NNXNode) -> bool:
    """Whether all keys of a container are numbers."""
    return all(isinstance(key, int) for key in node.children)


def open_stacks(place: Place, *, automatic: bool = False) -> list[tuple[NNXNode, LinenNode, Stack]]:
    """The stacks below two nodes that still need a counterpart, whatever they are called.

    Args:
      place: the two nodes.
      automatic: whether also layers whose numbers are those of automatic names.

    Returns:
      (NNX node, Linen scope, its pairs) of all that fit; of scopes one by one the first.
    """
    if place.context != PLAIN:
        return []
    return [*_lists(place, place.classes), *_stacked_modules(place, place.classes, automatic)]


def only_stacks(place: Place) -> list[tuple[NNXNode, LinenNode, Stack]]:
    """The open stacks that can be one thing only."""
    found = open_stacks(place)
    ours = Counter(id(node) for node, _, _ in found)
    theirs = Counter(id(scope) for _, scope, _ in found)
    return [each for each in found if ours[id(each[0])] == theirs[id(each[1])] == 1]


def _lists(place: Place, classes: frozenset[str]) -> Iterator[tuple[NNXNode, LinenNode, Stack]]:
    scopes = list(open_nodes(place.linen, place.settled, place.context, deep=True))
    for node in _open_lists(place.nnx, place):
        items = [signature(item, PLAIN, whole=True) for item in node.children.values()]
        if any(item != items[0] for item in items):
            continue
        # A scope with nothing but another one in it is the same stack.
        for scope in {core(scope): scope for scope in scopes}:
            first = list_pairs(node, scope, place.context, only_first=True)[0]
            if stackable_axes(first, classes):
                yield node, scope, cores(list_pairs(node, scope, place.context))


def _stacked_modules(
    place: Place, classes: frozenset[str], automatic: bool
) -> Iterator[tuple[NNXNode, LinenNode, Stack]]:
    for members in numbered_scopes(
        open_nodes(place.linen, place.settled, place.context, deep=False)
    ):
        if counts_constructions(members) and not automatic:
            continue
        for node in open_nodes(place.nnx, place.settled, place.context, deep=False):
            pairs = stack_pairs(node, members, place.context)
            if stackable_axes(pairs[0], classes):
                yield node, members[0], cores(pairs)


def numbered_scopes(scopes: Iterable[LinenNode]) -> Iterator[list[LinenNode]]:
    """Scopes whose names count up, and may be the layers of a stack in that order."""
    by_text = {scope.text: scope for scope in scopes}
    for own in families(by_text).values():
        numbers = sequence(own)
        if len(own) > 1 and numbers == [
            *range(min(numbers or [0]), len(own) + min(numbers or [0]))
        ]:
            yield [by_text[text] for text in own]


def cores(pairs: Stack) -> Stack:
    """The modules with layers of their own, as `matches` compares them."""
    return [(core(node), core(scope), context) for node, scope, context in pairs]


def _open_lists(node: NNXNode, place: Place) -> Iterator[NNXNode]:
    """The lists below a module that have no item with a partner yet."""
    for child in node.children.values():
        if child.is_leaf or not place.settled.is_free(child, place.context):
            continue
        items = child.children.values()
        whole = place.settled.is_untouched(child, place.context)
        is_whole_list = child.is_container and is_list(child) and len(items) > 1 and whole
        if is_whole_list and not any(item.is_leaf for item in items):
            yield child
        elif not is_whole_list:
            yield from _open_lists(child, place)


def stackable_axes(pair: tuple[NNXNode, LinenNode, Context], classes: frozenset[str]) -> list[int]:
    """The axes on which the shapes of all leaves say that they may be stacked."""
    node, scope, _ = pair
    values = [*node.below.values(), *scope.below.values()]
    rank = max((len(shape_of(value) or ()) for value in values), default=0)
    return first_axes(rank, lambda axis: _may_fit(on_axis(pair, axis), classes))


def first_axes(rank: int, fits: Callable[[int], bool]) -> list[int]:
    """The axes that fit, counted from the front; from behind if none does."""
    found = [axis for axis in range(rank) if fits(axis)]
    return found or [axis for axis in range(-1, -rank, -1) if fits(axis)]


def _may_fit(pair: tuple[NNXNode, LinenNode, Context], classes: frozenset[str]) -> bool:
    node, scope, context = pair
    return any(matches([node], [scope], context, classes).values())


def either(axes: list[int]) -> str:
    """Several axes for a message."""
    return " and ".join(map(str, axes)) + (" both" if len(axes) == 2 else " all")
