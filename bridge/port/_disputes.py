"""Pairs of equal names or numbers that traces or shapes contradict, and what decides instead."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ._context import PLAIN, Context
from ._correspondence import Correspondence, Evidence, PairedStack, Pairing
from ._evidence import DIFFERS, against_names
from ._orders import Orders, Pairs
from ._structure import (
    automatic_class,
    linen_shapes,
    linen_signature_of_pair,
    nnx_shapes,
    nnx_signature_of_pair,
    own_classes,
    types_agree,
)
from ._trees import LinenNode, NNXNode

# How pairs are known that a plan makes by itself.
HOW = {
    "by name": "equal names",
    "by number": "numbers in the same order, and nothing else",
    "by number and calls": "numbers in the same order, which is that of the calls",
    "by structure": "the only ones of their structure",
}
_TRANSPOSED = "the same shape; the models use different axes, so one has the transpose"
STACKED = "stacked leaves, which fit one axis only"
_Decided: TypeAlias = list[tuple[NNXNode, LinenNode, Evidence]]


class Disputes(NamedTuple):
    """What contradicts the pairs of a correspondence.

    Attributes:
      decided: the pairs that belong together instead.
      undecided: the pairs that are contradicted, and nothing says what belongs together instead.
    """

    decided: list[Pairing]
    undecided: list[Pairing]


def disputes(found: Correspondence, orders: Orders) -> Disputes:
    """What the traces and the shapes say against names and numbers.

    Args:
      found: what names, numbers and structure put together.
      orders: the orders of the two models.
    """
    judge, result = _Judge(orders, own_classes(found.nnx)), Disputes([], [])
    outer: set[LinenNode] = set()
    for stacks in _exchangeable_stacks(found.stacks):
        decided, undecided = _judged_stacks(stacks, orders)
        outer.update(pairing.linen for pairing in (*decided, *undecided))
        result.decided.extend(decided)
        result.undecided.extend(undecided)
    for group in _groups(found):
        # What is inside of a disputed pair is compared when it is decided.
        if outer.intersection(group[0].linen.lineage):
            continue
        for pairings, classes in _exchangeable(group):
            decided, undecided = judge.judged(pairings, classes)
            outer.update(pairing.linen for pairing in (*decided, *undecided))
            result.decided.extend(decided)
            result.undecided.extend(undecided)
    result.undecided.extend(_transposed(found, orders))
    return result


def _transposed(found: Correspondence, orders: Orders) -> Iterator[Pairing]:
    """Leaves that fit, of which one model uses the transpose."""
    leaves = {node.path: node for node in found.nnx_leaves()}
    for piece in found.pieces:
        if piece.nnx is None or piece.linen_region or piece.nnx_region:
            continue
        node, scope = leaves[piece.nnx], found.linen.at(piece.linen[1])
        if scope is not None and orders.is_transposed(node, scope):
            evidence = Evidence(_TRANSPOSED, is_weak=True, is_disputed=True)
            yield Pairing(scope, node, PLAIN, "by name", evidence)


def _exchangeable_stacks(stacks: Sequence[PairedStack]) -> Iterator[list[PairedStack]]:
    by_structure: dict[Hashable, list[PairedStack]] = {}
    for stack in stacks:
        first, total = stack.layers[0], len(stack.layers)
        at = [layer and layer.axis for layer in first.context]
        key = (*at, total, *_structures_of(first))
        by_structure.setdefault(key, []).append(stack)
    return (own for own in by_structure.values() if len(own) > 1)


def _judged_stacks(stacks: Sequence[PairedStack], orders: Orders) -> Disputes:
    """As `_Judge.judged`, of stacks that could be exchanged."""
    nodes, scopes = [stack.nnx for stack in stacks], [stack.linen for stack in stacks]
    pairs = list(zip(nodes, scopes, strict=True))
    if not orders.contradicts(pairs):
        return Disputes([], [])
    chain = orders.chain(nodes, scopes)
    if chain is None:
        return Disputes([], [_doubted(layer) for stack in stacks for layer in stack.layers])
    by_node, by_scope = (
        {id(each): s for each, s in zip(own, stacks, strict=True)} for own in (nodes, scopes)
    )
    evidence = against_names(orders.text)
    decided = [
        layer._replace(linen=other.linen, how="as proposed", proposal=evidence)
        for node, scope in chain
        for layer, other in zip(by_node[id(node)].layers, by_scope[id(scope)].layers, strict=True)
    ]
    return Disputes(decided, [])


class _Class(NamedTuple):
    """The modules of one structure."""

    nodes: list[NNXNode]
    scopes: list[LinenNode]


class _Judge:
    def __init__(self, orders: Orders, classes: frozenset[str]):
        self._orders = orders
        self._classes = classes

    def judged(self, pairings: Sequence[Pairing], classes: Sequence[_Class]) -> Disputes:
        """What is said against pairs of modules that could be exchanged."""
        pairs = [(pairing.nnx, pairing.linen) for pairing in pairings]
        # Without shapes that differ, the modules are all of one structure.
        if len(classes) == 1 and not self._orders.contradicts(pairs):
            return Disputes([], [])
        by_node = {pairing.nnx: pairing for pairing in pairings}
        decided = [self._only(*each, by_node) for each in classes]
        if None not in decided:
            new = [
                by_node[node]._replace(linen=scope, how="as proposed", proposal=evidence)
                for each in decided
                for node, scope, evidence in each or []
            ]
            return Disputes(new, [])
        # Of shapes that differ the plan tells.
        return Disputes([], [_doubted(each) for each in pairings] if len(classes) == 1 else [])

    def _only(
        self, nodes: list[NNXNode], scopes: list[LinenNode], given: dict[NNXNode, Pairing]
    ) -> _Decided | None:
        """The only pairs that modules of one structure can make."""
        pairs: Pairs | None = None
        if len(nodes) == len(scopes) == 1:
            pairs, text = [(nodes[0], scopes[0])], "their shapes"
        else:
            pairs, text = self._orders.chain(nodes, scopes), self._orders.text
        if pairs is None:
            return None
        for node, scope in pairs:
            # A program may give a block the name that an automatic one of a layer has.
            is_same_class = automatic_class(scope) == automatic_class(given[node].linen)
            if not is_same_class and not types_agree(node, scope, self._classes):
                return None
        return [(node, scope, against_names(text)) for node, scope in pairs]


def _doubted(pairing: Pairing) -> Pairing:
    if pairing.proposal and pairing.proposal.is_disputed:
        return pairing
    text = pairing.proposal.text if pairing.proposal else HOW.get(pairing.how, STACKED)
    return pairing._replace(proposal=Evidence(f"{text}; {DIFFERS}", True, True))


def _groups(found: Correspondence) -> list[list[Pairing]]:
    """The pairs that were found in one scope each, the outer ones first."""
    by_scope: dict[tuple[LinenNode, Context], list[Pairing]] = {}
    for pairing in (*found.named, *found.pairings):
        if pairing.within is not None:
            by_scope.setdefault((pairing.within, pairing.context), []).append(pairing)
    return [by_scope[key] for key in sorted(by_scope, key=lambda key: len(key[0].path))]


def _exchangeable(group: Sequence[Pairing]) -> Iterator[tuple[list[Pairing], list[_Class]]]:
    """The pairs that could be others among themselves, and their modules by structure."""
    keys = [_structures_of(pairing) for pairing in group]
    structures, sets = _Joined(), _Joined()
    for (ours, theirs), pairing in zip(keys, group, strict=True):
        # Inside, names may differ.
        if _shapes_of(pairing.nnx, pairing) == _shapes_of(pairing.linen, pairing):
            structures.join(ours, theirs)
    for ours, theirs in keys:
        sets.join(structures.first(ours), structures.first(theirs))
    found: dict[Hashable, list[Pairing]] = {}
    classes: dict[Hashable, dict[Hashable, _Class]] = {}
    for (ours, theirs), pairing in zip(keys, group, strict=True):
        which = sets.first(structures.first(ours))
        found.setdefault(which, []).append(pairing)
        own = classes.setdefault(which, {})
        own.setdefault(structures.first(ours), _Class([], [])).nodes.append(pairing.nnx)
        own.setdefault(structures.first(theirs), _Class([], [])).scopes.append(pairing.linen)
    for which, pairings in found.items():
        if len(pairings) > 1:
            yield pairings, list(classes[which].values())


def _structures_of(pairing: Pairing) -> tuple[Hashable, Hashable]:
    if pairing.nnx.is_leaf:
        return _shapes_of(pairing.nnx, pairing), _shapes_of(pairing.linen, pairing)
    ours = nnx_signature_of_pair(pairing.nnx, pairing.context)
    theirs = linen_signature_of_pair(pairing.linen, pairing.context)
    return frozenset(ours.items()), frozenset(theirs.items())


def _shapes_of(node: NNXNode | LinenNode, pairing: Pairing) -> Hashable:
    if isinstance(node, NNXNode):
        shapes = nnx_shapes(node, pairing.context)
    else:
        shapes = linen_shapes(node, pairing.context)
    return pairing.nnx.is_leaf, frozenset(shapes.items())


class _Joined:
    """Sets of things, of which some are joined to one."""

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable] = {}

    def first(self, item: Hashable) -> Hashable:
        """What stands for the set of a thing."""
        while (parent := self._parents.get(item, item)) != item:
            item = parent
        return item

    def join(self, one: Hashable, other: Hashable) -> None:
        """Makes the sets of two things one."""
        one, other = self.first(one), self.first(other)
        if one != other:
            self._parents[one] = other
