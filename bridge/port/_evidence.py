"""Proposes pairs of modules and leaves by their names and by the order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from bridge._layers.table import LEAF_NAMES

from ._correspondence import PLAIN, Context, Evidence, Stack
from ._likeness import pairs_by_name
from ._names import likeness
from ._numbers import families
from ._orders import CALLS, Orders, Pairs
from ._sequences import counts_constructions, groups, is_automatic
from ._structure import Place, open_nodes, shapes, types_agree
from ._trees import LinenNode, NNXNode

Proposals: TypeAlias = list[tuple[NNXNode, LinenNode, Evidence]]

ANY_ORDER = "some of the calls do not use each other's results, so any order would do"
CONSTRUCTIONS = "automatic numbers count constructions, not calls"
# What is said of names that a trace contradicts.
DIFFERS = "the order of calls differs"
_ONLY = Evidence("nothing else is left")
# How much of two modules has to be alike before they are proposed to be the same.
_ENOUGH = 0.5


class ByEvidence:
    """Proposes what belongs together where structure leaves several candidates.

    Args:
      orders: the orders of the two models.
    """

    def __init__(self, orders: Orders):
        self._orders = orders

    def numbered(self, pairs: Sequence[tuple[NNXNode, LinenNode]]) -> str | None:
        """How pairs that have numbered names are known, None if something speaks against them."""
        if self._orders.contradicts(pairs):
            return None
        nodes, scopes = [node for node, _ in pairs], [scope for _, scope in pairs]
        chain = self._orders.chain(nodes, scopes)
        return "by number and calls" if chain and {*chain} == {*pairs} else "by number"

    def axis(self, node: NNXNode, scope: LinenNode) -> tuple[int | None, Evidence]:
        """The axis on which leaves are stacked, None if nothing tells it, and what does."""
        for axis, library in self._orders.axes(node, scope):
            text = f"the axis of the scan that a trace of the {library} model shows"
            return axis, Evidence(text)
        return None, Evidence("", is_weak=True)

    def stacks(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `modules`, of lists and of stacked modules. Each of these takes a whole scope."""
        return [
            pair
            for nodes, scopes in groups(candidates)
            for pair in self._together(place, nodes, scopes)
        ]

    def layers(self, stack: Stack, evidence: Evidence) -> Stack:
        """A stack with evidence, in the order of calls if automatic names count its layers."""
        if counts_constructions(stack.scopes):
            numbers = self._orders.layer_numbers(stack.items, stack.nnx)
            if numbers is None:
                evidence = Evidence(_joined(evidence.text, CONSTRUCTIONS), is_weak=True)
            else:
                stack = stack.numbered(numbers)
                evidence = Evidence(_joined(evidence.text, CALLS))
        return stack._replace(proposal=evidence)

    def stacked_leaves(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `stacks`, of single leaves."""
        text = "stacked leaves, whose shapes are those of the layers"
        clear = {
            node: [scope for scope in scopes if not _are_told_apart(node, scope)]
            for node, scopes in candidates.items()
        }
        return [
            (node, scope, Evidence(_joined(text, evidence.text), True))
            for nodes, scopes in groups(clear)
            for node, scope, evidence in self._together(place, nodes, scopes, Evidence(text))
        ]

    def modules(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """Proposes pairs of modules below two nodes that belong together.

        Args:
          place: the two nodes, and what is open below them.
          candidates: the scopes that each open NNX module could be.
        """
        weak: Proposals = []
        for nodes, scopes in groups(_outermost(candidates)):
            proposals = self._together(place, nodes, scopes)
            if proposals and not any(evidence.is_weak for _, _, evidence in proposals):
                return proposals
            # What is clear leaves fewer candidates for the rest, so it comes first.
            weak = weak or proposals
        return weak or self._alike(place)

    def leaves(self, place: Place) -> Proposals:
        """Proposes pairs of leaves that lie directly below two nodes."""
        context, is_free = place.context, place.settled.is_free
        nodes = [each for each in place.nnx.weights.values() if is_free(each, context)]
        scopes = [each for each in place.linen.weights.values() if is_free(each, context)]
        candidates = {
            node: [
                scope
                for scope in scopes
                if shapes(node, place.context) == shapes(scope, place.context)
                and not _are_told_apart(node, scope)
                and not self._is_transposed(node, scope, place.context)
            ]
            for node in nodes
        }
        return [
            pair
            for own, others in groups(candidates)
            for pair in self._together(place, own, others, self._by_shape(own, others, place))
        ]

    def _is_transposed(self, node: NNXNode, scope: LinenNode, context: Context) -> bool | None:
        return self._orders.is_transposed(node, scope) if context == PLAIN else None

    def _by_shape(
        self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode], place: Place
    ) -> Evidence:
        """What the shape of two leaves says that no others have."""
        node, scope, text = nodes[0], scopes[0], "the same shape"
        is_named = likeness(node.name, scope.name) >= _ENOUGH
        if self._is_transposed(node, scope, place.context) is False:
            return Evidence(f"{text}, used alike in both models")
        ((_, shape),) = shapes(node, place.context)
        sizes = [size for size in shape or () if size > 1]
        if len({*sizes}) < len(sizes):
            return Evidence(f"{text}, which a transpose has too", is_weak=True)
        return Evidence(f"{text} and their names" if is_named else text, is_weak=not is_named)

    def _together(
        self,
        place: Place,
        nodes: Sequence[NNXNode],
        scopes: Sequence[LinenNode],
        only: Evidence = _ONLY,
    ) -> Proposals:
        """Pairs of modules that could all be exchanged."""
        if len(nodes) == len(scopes) == 1:
            return [(nodes[0], scopes[0], only)]
        chain = self._orders.chain(nodes, scopes)
        by_order = chain or self._orders.in_order(nodes, scopes)
        by_name = pairs_by_name(place, nodes, scopes)
        # Names that a program chose say more than an order: query, key and value may be computed in
        # any. Automatic ones say less: they number the constructions.
        names_count = any(not is_automatic(scope, scopes) for _, scope in by_name)
        if by_order is not None:
            named = {id(node): scope for node, scope in by_name}
            agree = all(named.get(id(node), scope) is scope for node, scope in by_order)
            if agree or not names_count:
                text = CALLS + (" and names" if agree and names_count else "")
                return self._ordered(by_order, text, by_name if agree and names_count else [])
            if chain is not None:
                return _proposals(chain, against_names(CALLS))
        if by_name:
            text = "their names"
            if self._orders.contradicts(by_name):
                return _proposals(by_name, Evidence(f"{text}; {DIFFERS}", True, True))
            if any(is_automatic(scope, scopes) for _, scope in by_name):
                text += f"; {CONSTRUCTIONS}"
            return _proposals(by_name, Evidence(text, text != "their names"))
        return self._by_numbers(nodes, scopes)

    def _by_numbers(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Proposals:
        ours = {node.text: node for node in nodes}
        theirs = {scope.text: scope for scope in scopes}
        own, others = families(ours), families(theirs)
        if len(nodes) != len(scopes) or len(own) != 1 or len(others) != 1:
            return []
        (one,), (other,) = own.values(), others.values()
        pairs = [(ours[a], theirs[b]) for a, b in zip(one, other, strict=True)]
        is_weak = counts_constructions(scopes)
        text = "numbers in the same order"
        if is_weak:
            text += f"; {CONSTRUCTIONS}"
        return _proposals(pairs, Evidence(text, is_weak))

    def _ordered(self, pairs: Pairs, text: str, named: Pairs) -> Proposals:
        """Proposals by the order of calls, weak where it could be another and no name tells."""
        names = {
            id(node) for node, scope in named if not is_automatic(scope, [s for _, s in pairs])
        }
        proposals: Proposals = []
        for pair, is_told in zip(pairs, self._orders.told(pairs), strict=True):
            if is_told or id(pair[0]) in names:
                proposals.append((*pair, Evidence(text)))
            else:
                proposals.append((*pair, Evidence(f"{text}; {ANY_ORDER}", is_weak=True)))
        return proposals

    def _alike(self, place: Place) -> Proposals:
        """The two open modules that are most alike, if their leaves are not all the same.

        A module whose own parameters have other names, or that lacks one, has no candidates.
        """
        context = place.context
        nodes = list(open_nodes(place.nnx, place.settled, context, deep=False))
        scopes = list(open_nodes(place.linen, place.settled, context, deep=False))
        ours = {id(node): shapes(node, context) for node in nodes}
        theirs = {id(scope): shapes(scope, context) for scope in scopes}
        candidates = {
            node: [
                scope
                for scope in scopes
                if _share(ours[id(node)], theirs[id(scope)]) >= _ENOUGH
                and types_agree(node, scope, place.classes)
            ]
            for node in nodes
        }
        same = {
            node: [scope for scope in own if theirs[id(scope)] == ours[id(node)]]
            for node, own in candidates.items()
        }
        for text, chosen in (
            ("the same shapes under other names", same),
            ("most of the same shapes", candidates),
        ):
            for own, others in groups(chosen):
                found = self._together(place, own, others, Evidence(text))
                if found:
                    return [(n, s, Evidence(_joined(text, e.text), True)) for n, s, e in found]
        return []


def against_names(text: str) -> Evidence:
    """Evidence that decides, although names say otherwise."""
    return Evidence(f"{text}, although names say otherwise", is_disputed=True)


def _share(ours: Counter[Any], theirs: Counter[Any]) -> float:
    """How many of the leaves of two modules have the same shape, from 0 to 1."""
    either = sum((ours | theirs).values())
    return sum((ours & theirs).values()) / either if either else 0.0


def _are_told_apart(node: NNXNode, scope: LinenNode) -> bool:
    """Whether two leaves have different names of leaves of Flax's layers, as scale and bias."""
    ours, theirs = node.name, scope.name
    return ours != theirs and {ours, theirs} <= LEAF_NAMES


def _outermost(candidates: dict[NNXNode, list[LinenNode]]) -> dict[NNXNode, list[LinenNode]]:
    """Without modules that lie inside of another one that has candidates."""
    paths = {node.path for node, scopes in candidates.items() if scopes}
    return {
        node: scopes
        for node, scopes in candidates.items()
        if scopes and not any(node.path[:n] in paths for n in range(len(node.path)))
    }


def _proposals(pairs: Pairs, evidence: Evidence) -> Proposals:
    return [(node, scope, evidence) for node, scope in pairs]


def _joined(*texts: str) -> str:
    return "; ".join(dict.fromkeys(texts))
