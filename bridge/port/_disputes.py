"""Pairs of equal names or numbers that traces or shapes contradict, and what decides instead."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Address, Path

from ._correspondence import PLAIN, Context, Correspondence, Evidence, Pairing, Stack
from ._evidence import DIFFERS, against_names
from ._orders import CALLS, TRANSPOSED, Orders, Pairs
from ._structure import (
    automatic_class,
    own_classes,
    shapes,
    signature,
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
    judge, result = _Judge(found, orders), Disputes([], [])
    outer: set[LinenNode] = set()
    for stack, is_given in _exchanged_stacks(found.stacks, orders, result):
        decided, undecided = _judged_layers(stack, orders)
        new = decided or ([] if is_given else stack.layers)
        outer.update(pairing.linen for pairing in (*new, *undecided))
        result.decided.extend(new)
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
    result.undecided.extend(_used_otherwise(found, orders))
    return result


def _used_otherwise(found: Correspondence, orders: Orders) -> Iterator[Pairing]:
    """Leaves that fit, and that one model transposes, reverses or takes apart otherwise."""
    leaves = found.nnx_leaves
    for piece in found.pieces:
        if piece.nnx is None or piece.axes or piece.linen_region or piece.nnx_region:
            continue
        node, scope = leaves[piece.nnx], found.linen.at(piece.linen[1])
        if scope is None or shape_of(node.value) != shape_of(found.linen_values[piece.linen]):
            continue
        if text := _other_use(node, scope, orders):
            evidence = Evidence(f"the same shape; {text}", is_weak=True, is_disputed=True)
            yield Pairing(scope, node, PLAIN, "by name", evidence)


def _other_use(node: NNXNode, scope: LinenNode, orders: Orders) -> str | None:
    """What two models do otherwise with two leaves of one shape, if traces show it."""
    if orders.is_transposed(node, scope):
        return TRANSPOSED
    if {orders.runs_backwards(node), orders.runs_backwards(scope)} == {False, True}:
        return "only one of the models scans the layers backwards"
    if orders.is_cut_otherwise(node, scope):
        return "only one of the models has a share of each part in each head"
    return None


def _judged_layers(stack: Stack, orders: Orders) -> Disputes:
    """What a chain of calls on one side and a scan on the other say of the numbers of layers."""
    stacked = stack.linen if stack.is_list else stack.nnx
    numbers = orders.layer_numbers(stack.items, stacked)
    if numbers is None or numbers == [*range(len(stack.items))]:
        return Disputes([], [])
    # A rule says which layer a Linen scope is, and not which one an item of a list is.
    if stack.is_list:
        return Disputes([], [_doubted(layer) for layer in stack.layers])
    new = stack.numbered(numbers)._replace(how="as proposed", proposal=against_names(CALLS))
    return Disputes(new.layers, [])


def _exchanged_stacks(
    stacks: Sequence[Stack], orders: Orders, result: Disputes
) -> Iterator[tuple[Stack, bool]]:
    """The stacks as a chain of calls pairs them, and whether each is as it was.

    Those that calls contradict without deciding are noted as undecided.
    """
    by_structure: dict[Hashable, list[Stack]] = {}
    for stack in stacks:
        at = stack.is_list, stack.axis, len(stack.items)
        by_structure.setdefault((*at, *_structures_of(stack.layers[0])), []).append(stack)
    for own in by_structure.values():
        nodes, scopes = [stack.nnx for stack in own], [stack.linen for stack in own]
        pairs = list(zip(nodes, scopes, strict=True))
        if not orders.contradicts(pairs):
            yield from ((stack, True) for stack in own)
        elif chain := orders.chain(nodes, scopes):
            by_node, by_scope = (dict(zip(side, own, strict=True)) for side in (nodes, scopes))
            for node, scope in chain:
                ours, theirs = by_node[node], by_scope[scope]
                items = ours.items if ours.is_list else theirs.items
                new = ours._replace(linen=theirs.linen, items=items, how="as proposed")
                yield new._replace(proposal=against_names(CALLS)), False
        else:
            result.undecided.extend(_doubted(layer) for stack in own for layer in stack.layers)


class _Class(NamedTuple):
    """The modules of one structure."""

    nodes: list[NNXNode]
    scopes: list[LinenNode]


class _Judge:
    def __init__(self, found: Correspondence, orders: Orders):
        self._orders = orders
        self._classes = own_classes(found.nnx)
        # By the scopes around them, so that a model of many blocks is not read for each.
        self._leaves: dict[Path, list[tuple[Path, Address]]] = {}
        for piece in found.pieces if orders.are_traced else []:
            path = piece.linen[1]
            for n in range(len(path)) if piece.nnx is not None else []:
                self._leaves.setdefault(path[:n], []).append((piece.nnx or (), piece.linen))

    def judged(self, pairings: Sequence[Pairing], classes: Sequence[_Class]) -> Disputes:
        """What is said against pairs of modules that could be exchanged."""
        pairs = [(pairing.nnx, pairing.linen) for pairing in pairings]
        # Without shapes that differ, the modules are all of one structure.
        by_node = {pairing.nnx: pairing for pairing in pairings}
        if len(classes) == 1 and not self._orders.contradicts(pairs):
            within = pairings[0].within
            new = self._by_surroundings(pairs, self._leaves.get(within.path, []) if within else [])
            text = f"{CALLS} around them"
            return Disputes(
                [_instead(by_node[node], s, against_names(text)) for node, s in new], []
            )
        decided = [self._only(*each, by_node) for each in classes]
        if None not in decided:
            new = [
                _instead(by_node[node], scope, evidence)
                for each in decided
                for node, scope, evidence in each or []
                # An equal name needs no rule.
                if scope is not by_node[node].linen or by_node[node].how != "by name"
            ]
            return Disputes(new, [])
        # Of shapes that differ the plan tells.
        return Disputes([], [_doubted(each) for each in pairings] if len(classes) == 1 else [])

    def _by_surroundings(self, pairs: Pairs, leaves: Sequence[tuple[Path, Address]]) -> Pairs:
        """The pairs that lie between the same other leaves in both models, if it is not these."""
        own = {node.path for node, _ in pairs}
        anchors = [
            (path, address)
            for path, address in leaves
            if not any(path[:n] in own for n in range(len(path) + 1))
        ]
        if not anchors:
            return []
        ours = {self._orders.around(node, anchors): node for node, _ in pairs}
        theirs = {self._orders.around(scope, anchors): scope for _, scope in pairs}
        if len(ours) < len(pairs) or ours.keys() != theirs.keys():
            return []
        new = [(node, theirs[place]) for place, node in ours.items()]
        return [] if {*new} == {*pairs} else new

    def _only(
        self, nodes: list[NNXNode], scopes: list[LinenNode], given: dict[NNXNode, Pairing]
    ) -> _Decided | None:
        """The only pairs that modules of one structure can make."""
        pairs: Pairs | None = None
        if len(nodes) == len(scopes) == 1:
            pairs, text = [(nodes[0], scopes[0])], "their shapes"
        else:
            pairs, text = self._orders.chain(nodes, scopes), CALLS
        if pairs is None:
            return None
        for node, scope in pairs:
            # A program may give a block the name that an automatic one of a layer has.
            is_same_class = automatic_class(scope) == automatic_class(given[node].linen)
            if not is_same_class and not types_agree(node, scope, self._classes):
                return None
        return [(node, scope, against_names(text)) for node, scope in pairs]


def _instead(pairing: Pairing, scope: LinenNode, evidence: Evidence) -> Pairing:
    return pairing._replace(linen=scope, how="as proposed", proposal=evidence)


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
    ours = signature(pairing.nnx, pairing.context)
    theirs = signature(pairing.linen, pairing.context)
    return frozenset(ours.items()), frozenset(theirs.items())


def _shapes_of(node: NNXNode | LinenNode, pairing: Pairing) -> Hashable:
    return pairing.nnx.is_leaf, frozenset(shapes(node, pairing.context).items())


class _Joined:
    """Sets of things; some of them are joined to one."""

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
