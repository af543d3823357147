"""Pairs of equal names or numbers that traces or shapes contradict, and what decides instead."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from bridge._conversion.neutral import Address, Path

from . import _reasons
from ._correspondence import PLAIN, Context, Correspondence, Pairing, Stack
from ._orders import Orders, Pairs
from ._reasons import Evidence
from ._sequences import connected
from ._structure import (
    automatic_class,
    own_classes,
    shapes,
    signature,
    types_agree,
)
from ._trees import LinenNode, NNXNode

_Decided: TypeAlias = list[tuple[NNXNode, LinenNode, Evidence]]


class Disputes(NamedTuple):
    """What contradicts the pairs of a correspondence.

    The `decided` pairs belong together instead. The `undecided` ones are contradicted, and nothing
    says what belongs together instead.
    """

    decided: list[Pairing]
    undecided: list[Pairing]


def disputes(found: Correspondence, orders: Orders) -> Disputes:
    """What the traces and the shapes say against names and numbers."""
    judge, result = _Judge(found, orders), Disputes([], [])
    outer: set[LinenNode] = set()
    for stack, is_given in _exchanged_stacks(found.stacks, orders, result):
        decided, undecided = _judged_layers(stack, orders)
        new = decided or ([] if is_given else stack.layers)
        outer.update(pairing.linen for pairing in (*new, *undecided))
        result.decided.extend(new)
        result.undecided.extend(undecided)
    for group in _groups(found):
        # What is inside a disputed pair is compared when it is decided.
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
    for node, scope, _ in found.same_leaves():
        if use := _other_use(node, scope, orders):
            evidence = (_reasons.SAME_SHAPE & use)._replace(is_disputed=True)
            yield Pairing(scope, node, PLAIN, "by name", evidence)


def _other_use(node: NNXNode, scope: LinenNode, orders: Orders) -> Evidence | None:
    """What two models do otherwise with two leaves of one shape, if traces show it."""
    if orders.is_transposed(node, scope):
        return _reasons.TRANSPOSED
    if {orders.runs_backwards(node), orders.runs_backwards(scope)} == {False, True}:
        return _reasons.BACKWARDS
    if orders.is_cut_otherwise(node, scope):
        return _reasons.CUT_OTHERWISE
    return None


def _judged_layers(stack: Stack, orders: Orders) -> Disputes:
    """What a chain of calls on one side and a scan on the other say of the numbers of layers."""
    numbers = orders.layer_numbers(stack)
    if numbers is None or numbers == [*range(len(stack.items))]:
        return Disputes([], [])
    # A rule says which layer a Linen scope is, and not which one an item of a list is.
    if stack.is_list:
        return Disputes([], [_doubted(layer) for layer in stack.layers])
    new = stack.numbered(numbers)._replace(how="as proposed", proposal=_reasons.CALLS.against_names)
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
                yield new._replace(proposal=_reasons.CALLS.against_names), False
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
            evidence = _reasons.CALLS_AROUND.against_names
            return Disputes([_instead(by_node[node], s, evidence) for node, s in new], [])
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
            pairs, evidence = [(nodes[0], scopes[0])], _reasons.SHAPES
        else:
            pairs, evidence = self._orders.chain(nodes, scopes), _reasons.CALLS
        if pairs is None:
            return None
        for node, scope in pairs:
            # A program may give a block the name that an automatic one of a layer has.
            is_same_class = automatic_class(scope) == automatic_class(given[node].linen)
            if not is_same_class and not types_agree(node, scope, self._classes):
                return None
        return [(node, scope, evidence.against_names) for node, scope in pairs]


def _instead(pairing: Pairing, scope: LinenNode, evidence: Evidence) -> Pairing:
    return pairing._replace(linen=scope, how="as proposed", proposal=evidence)


def _doubted(pairing: Pairing) -> Pairing:
    if pairing.proposal and pairing.proposal.is_disputed:
        return pairing
    return pairing._replace(proposal=pairing.evidence & _reasons.DIFFERS)


def _groups(found: Correspondence) -> list[list[Pairing]]:
    """The pairs that were found in one scope each, the outer ones first."""
    by_scope: dict[tuple[LinenNode, Context], list[Pairing]] = {}
    for pairing in found.pairings:
        if pairing.within is not None:
            by_scope.setdefault((pairing.within, pairing.context), []).append(pairing)
    return [by_scope[key] for key in sorted(by_scope, key=lambda key: len(key[0].path))]


def _exchangeable(group: Sequence[Pairing]) -> Iterator[tuple[list[Pairing], list[_Class]]]:
    """The pairs that could be others among themselves, and their modules by structure."""
    keys = [_structures_of(pairing) for pairing in group]
    edges = [(key, key) for both in keys for key in both]
    for both, pairing in zip(keys, group, strict=True):
        # Inside, names may differ.
        if _shapes_of(pairing.nnx, pairing) == _shapes_of(pairing.linen, pairing):
            edges.append(both)
    structure = connected(edges)
    of_pairs = [(structure[ours], structure[theirs]) for ours, theirs in keys]
    set_of = connected(of_pairs)
    found: dict[Hashable, tuple[list[Pairing], dict[Hashable, _Class]]] = {}
    for (ours, theirs), pairing in zip(of_pairs, group, strict=True):
        pairings, classes = found.setdefault(set_of[ours], ([], {}))
        pairings.append(pairing)
        classes.setdefault(ours, _Class([], [])).nodes.append(pairing.nnx)
        classes.setdefault(theirs, _Class([], [])).scopes.append(pairing.linen)
    for pairings, classes in found.values():
        if len(pairings) > 1:
            yield pairings, list(classes.values())


def _structures_of(pairing: Pairing) -> tuple[Hashable, Hashable]:
    if pairing.nnx.is_leaf:
        return _shapes_of(pairing.nnx, pairing), _shapes_of(pairing.linen, pairing)
    ours = signature(pairing.nnx, pairing.context)
    theirs = signature(pairing.linen, pairing.context)
    return frozenset(ours.items()), frozenset(theirs.items())


def _shapes_of(node: NNXNode | LinenNode, pairing: Pairing) -> Hashable:
    return pairing.nnx.is_leaf, frozenset(shapes(node, pairing.context).items())
