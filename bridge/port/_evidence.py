"""Proposes pairs of modules and leaves by their names and by the order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from bridge._layers.table import LEAF_NAMES

from . import _reasons
from ._correspondence import PLAIN, Context, Stack
from ._likeness import pairs_by_name
from ._names import likeness
from ._orders import Orders, Pairs
from ._reasons import Evidence
from ._sequences import counts_constructions, groups, is_automatic, numbered_pairs
from ._stacks import either
from ._structure import Place, shapes, types_agree
from ._trees import LinenNode, NNXNode

Proposals: TypeAlias = list[tuple[NNXNode, LinenNode, Evidence]]

# How much of two modules has to be alike before they are proposed to be the same.
_ENOUGH = 0.5


class ByEvidence:
    """Proposes what belongs together where structure leaves several candidates."""

    def __init__(self, orders: Orders):
        self._orders = orders

    def certain(self, candidates: dict[NNXNode, list[LinenNode]]) -> Pairs:
        """The pairs that a chain of calls leaves no choice about, whatever their names."""
        found: Pairs = []
        for nodes, scopes in groups(candidates):
            found += self._orders.chain(nodes, scopes) or [] if len(nodes) > 1 else []
        return found

    def stacks(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `modules`, of lists and of stacked modules. Each of these takes a whole scope."""
        return [
            pair
            for nodes, scopes in groups(candidates)
            for pair in self._together(place, nodes, scopes)
        ]

    def stack(self, stack: Stack, axes: list[int]) -> Stack:
        """A stack on one of several axes and in the order that traces show, with the evidence."""
        evidence, axis = stack.proposal or _reasons.STACKED, axes[0]
        if len(axes) > 1:
            shown, library = self.axis(stack.nnx, stack.linen)
            if shown in axes:
                axis, text = (
                    shown,
                    f"the axis of the scan that a trace of the {library} model shows",
                )
                evidence &= Evidence(text)
            else:
                text = f"stacked on axis {either(axes)} fit"
                text += f"; {axis} is nn.scan's default, and '@{axes[1]}' behind '*' is another"
                evidence &= Evidence(text, is_weak=True)
        numbers = self._orders.layer_numbers(stack)
        counts = counts_constructions(stack.scopes)
        if numbers is not None and numbers != [*range(len(numbers))] and stack.is_list:
            # A rule says which layer a Linen scope is, and not which one an item of a list is.
            evidence &= _reasons.DIFFERS
        elif numbers is not None and (counts or numbers != [*range(len(numbers))]):
            stack, evidence = stack.numbered(numbers), evidence & _reasons.CALLS
        elif counts:
            evidence &= _reasons.CONSTRUCTIONS
        return stack._replace(axis=axis, proposal=evidence)

    def axis(self, node: NNXNode, scope: LinenNode) -> tuple[int | None, str]:
        """The axis on which leaves are stacked, and the library with the trace that tells it."""
        return next(self._orders.axes(node, scope), (None, ""))

    def stacked_leaves(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `stacks`, of single leaves."""
        clear = {
            node: [scope for scope in scopes if not _are_told_apart(node, scope)]
            for node, scopes in candidates.items()
        }
        return [
            (node, scope, _reasons.STACKED_LEAVES & evidence)
            for nodes, scopes in groups(clear)
            for node, scope, evidence in self._together(
                place, nodes, scopes, _reasons.STACKED_LEAVES
            )
        ]

    def modules(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """Proposes pairs of modules below two nodes that belong together.

        `candidates` has the scopes that each open NNX module could be.
        """
        weak: Proposals = []
        for nodes, scopes in groups(_outermost(candidates)):
            proposals = self._together(place, nodes, scopes)
            if proposals and not any(evidence.is_weak for _, _, evidence in proposals):
                return proposals
            # What is clear leaves fewer candidates for the rest, so it comes first.
            weak = weak or proposals
        return weak or self._alike(place)

    def leaf_candidates(self, place: Place) -> dict[NNXNode, list[LinenNode]]:
        """The Linen leaves that each open leaf directly below two nodes could be."""
        context, is_free = place.context, place.settled.is_free
        nodes = [each for each in place.nnx.weights.values() if is_free(each, context)]
        scopes = [each for each in place.linen.weights.values() if is_free(each, context)]
        return {
            node: [
                scope
                for scope in scopes
                if shapes(node, context) == shapes(scope, context)
                and not _are_told_apart(node, scope)
                and not self._is_transposed(node, scope, context)
            ]
            for node in nodes
        }

    def leaves(self, place: Place) -> Proposals:
        """Proposes pairs of leaves that lie directly below two nodes."""
        return [
            pair
            for own, others in groups(self.leaf_candidates(place))
            for pair in self._together(place, own, others, self._by_shape(own, others, place))
        ]

    def _is_transposed(self, node: NNXNode, scope: LinenNode, context: Context) -> bool | None:
        return self._orders.is_transposed(node, scope) if context == PLAIN else None

    def _by_shape(
        self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode], place: Place
    ) -> Evidence:
        """What the shape of two leaves says that no others have."""
        node, scope = nodes[0], scopes[0]
        is_named = likeness(node.name, scope.name) >= _ENOUGH
        if self._is_transposed(node, scope, place.context) is False:
            return _reasons.SAME_USE
        ((_, shape),) = shapes(node, place.context)
        sizes = [size for size in shape or () if size > 1]
        if len({*sizes}) < len(sizes):
            return _reasons.SYMMETRIC
        return _reasons.SAME_SHAPE_AND_NAMES if is_named else _reasons.SAME_SHAPE

    def _together(
        self,
        place: Place,
        nodes: Sequence[NNXNode],
        scopes: Sequence[LinenNode],
        only: Evidence = _reasons.ONLY,
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
                if agree and names_count:
                    return self._ordered(by_order, _reasons.CALLS_AND_NAMES, by_name)
                return self._ordered(by_order, _reasons.CALLS, [])
            if chain is not None:
                return _proposals(chain, _reasons.CALLS.against_names)
        if by_name:
            evidence = _reasons.THEIR_NAMES
            if self._orders.contradicts(by_name):
                evidence &= _reasons.DIFFERS
            elif any(is_automatic(scope, scopes) for _, scope in by_name):
                evidence &= _reasons.CONSTRUCTIONS
            return _proposals(by_name, evidence)
        return self._by_numbers(nodes, scopes)

    def _by_numbers(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Proposals:
        pairs = numbered_pairs({node: list(scopes) for node in nodes}, automatic=True)
        evidence = _reasons.NUMBERS
        if counts_constructions(scopes):
            evidence &= _reasons.CONSTRUCTIONS
        return _proposals(pairs, evidence)

    def _ordered(self, pairs: Pairs, evidence: Evidence, named: Pairs) -> Proposals:
        """Proposals by the order of calls, weak where it could be another and no name tells."""
        names = {
            id(node) for node, scope in named if not is_automatic(scope, [s for _, s in pairs])
        }
        weak, told = evidence & _reasons.ANY_ORDER, self._orders.told(pairs)
        return [
            (node, scope, evidence if is_told or id(node) in names else weak)
            for (node, scope), is_told in zip(pairs, told, strict=True)
        ]

    def _alike(self, place: Place) -> Proposals:
        """The two open modules that are most alike, if their leaves are not all the same.

        A module with other names of its own parameters, or without one of them, has no candidates.
        """
        context = place.context
        nodes = list(place.open_below(place.nnx, deep=False))
        scopes = list(place.open_below(place.linen, deep=False))
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
        for evidence, chosen in ((_reasons.SAME_SHAPES, same), (_reasons.MOST_SHAPES, candidates)):
            for own, others in groups(chosen):
                if found := self._together(place, own, others, evidence):
                    return [(node, scope, evidence & told) for node, scope, told in found]
        return []


def _share(ours: Counter[Any], theirs: Counter[Any]) -> float:
    """How many of the leaves of two modules have the same shape, from 0 to 1."""
    either = sum((ours | theirs).values())
    return sum((ours & theirs).values()) / either if either else 0.0


def _are_told_apart(node: NNXNode, scope: LinenNode) -> bool:
    """Whether two leaves have different names of leaves of Flax's layers, as scale and bias."""
    ours, theirs = node.name, scope.name
    return ours != theirs and {ours, theirs} <= LEAF_NAMES


def _outermost(candidates: dict[NNXNode, list[LinenNode]]) -> dict[NNXNode, list[LinenNode]]:
    """Without modules that lie inside another one that has candidates."""
    paths = {node.path for node, scopes in candidates.items() if scopes}
    return {
        node: scopes
        for node, scopes in candidates.items()
        if scopes and not any(node.path[:n] in paths for n in range(len(node.path)))
    }


def _proposals(pairs: Pairs, evidence: Evidence) -> Proposals:
    return [(node, scope, evidence) for node, scope in pairs]
