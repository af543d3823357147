"""Proposes pairs of modules and leaves by their names and by the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bridge._rules.numbers import families

from . import _reasons
from ._correspondence import PLAIN, Context, Pairing, Stack
from ._names import likeness
from ._reasons import Evidence
from ._structure import (
    Place,
    Stacks,
    automatically_numbered,
    by_node,
    either,
    groups,
    shapes,
    told_apart,
)
from ._traces import Pairs, Traces
from ._trees import LinenNode, NNXNode, nnx_text, outermost

# How much of two names has to be alike for two things to be the same.
_ENOUGH = 0.5

Proposals: TypeAlias = list[tuple[NNXNode, LinenNode, Evidence]]


class ByEvidence:
    """Proposes what belongs together where structure leaves several candidates."""

    def __init__(self, traces: Traces):
        self._traces = traces

    def certain(self, candidates: dict[NNXNode, list[LinenNode]]) -> Pairs:
        """The pairs that a chain of calls leaves no choice about, whatever their names."""
        found: Pairs = []
        for nodes, scopes in groups(candidates):
            found += self._traces.chain(nodes, scopes) or [] if len(nodes) > 1 else []
        return found

    def stacks(self, place: Place, stacks: Stacks, only: Evidence) -> list[Stack]:
        """The stacks that belong together. Each of them takes a whole list or scope."""
        return [
            stacks[node, scope]._replace(proposal=evidence)
            for nodes, scopes in _outer_groups(by_node(stacks))
            for node, scope, evidence in self._together(place, nodes, scopes, only)
            if (node, scope) in stacks
        ]

    def stack(self, stack: Stack) -> Stack:
        """A stack on the axis and in the order that traces show, with the evidence."""
        axes, evidence = stack.fitting, stack.proposal or _reasons.STACKED
        axis, library = self._traces.axis(stack) or (None, "")
        if len(axes) > 1 and axis in axes:
            evidence &= Evidence(f"the axis of the scan that a trace of the {library} model shows")
        elif len(axes) > 1:
            text = f"stacked on axis {either(axes)} fit"
            text += f"; {axes[0]} is nn.scan's default, and '@{axes[1]}' behind '*' is another"
            evidence &= Evidence(text, is_weak=True)
        axis = axis if axis in axes else axes[0]
        numbers = self._traces.layer_numbers(stack)
        counts = automatically_numbered(stack.scopes)
        if numbers is not None and numbers != [*range(len(numbers))] and stack.is_list:
            # A rule says which layer a Linen scope is, and not which one an item of a list is.
            evidence &= _reasons.DIFFERS
        elif numbers is not None and (counts or numbers != [*range(len(numbers))]):
            stack, evidence = stack.numbered(numbers), evidence & _reasons.CALLS
        elif counts:
            evidence &= _reasons.CONSTRUCTIONS
        return stack._replace(axis=axis, proposal=evidence)

    def modules(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """Proposes pairs of modules below two nodes that belong together.

        `candidates` has the scopes that each open NNX module could be.
        """
        weak: Proposals = []
        for nodes, scopes in _outer_groups(candidates):
            proposals = self._together(place, nodes, scopes)
            if proposals and not any(evidence.is_weak for _, _, evidence in proposals):
                return proposals
            # What is clear leaves fewer candidates for the rest, so it comes first.
            weak = weak or proposals
        return weak

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
                and not told_apart(node, scope)
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
        return self._traces.is_transposed(node, scope) if context == PLAIN else None

    def _by_shape(
        self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode], place: Place
    ) -> Evidence:
        """What the shape of two leaves says that no others have."""
        node, scope = nodes[0], scopes[0]
        if self._is_transposed(node, scope, place.context) is False:
            return _reasons.SAME_USE
        ((_, shape),) = shapes(node, place.context)
        sizes = [size for size in shape or () if size > 1]
        if len({*sizes}) < len(sizes):
            return _reasons.SYMMETRIC
        return _reasons.SAME_SHAPE_AND_NAMES if are_alike(node, scope) else _reasons.SAME_SHAPE

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
        if chain := self._traces.chain(nodes, scopes):
            return _proposals(chain, _reasons.CALLS)
        named = pairs_by_name(place, nodes, scopes)
        # Names that a program chose say more than an order: query, key and value may be computed in
        # any. Automatic ones say less: they number the constructions.
        numbered = automatically_numbered(scopes)
        chosen = [(n, s) for n, s in named if not (s.is_automatic or s in numbered)]
        if chosen:
            differs = self._traces.contradicts(chosen)
            evidence = _reasons.THEIR_NAMES
            return _proposals(chosen, evidence & _reasons.DIFFERS if differs else evidence)
        ours, theirs = self._traces.in_order(nodes), self._traces.in_order(scopes)
        if ours and theirs and len(ours) == len(theirs):
            by_order = list(zip(ours, theirs, strict=True))
            weak, told = _reasons.CALLS & _reasons.ANY_ORDER, self._traces.told(by_order)
            return [
                (*pair, _reasons.CALLS if is_told else weak)
                for pair, is_told in zip(by_order, told, strict=True)
            ]
        return _proposals(named, _reasons.THEIR_NAMES & _reasons.CONSTRUCTIONS)


def are_alike(node: NNXNode, scope: LinenNode) -> bool:
    """Whether the last names of two paths are alike."""
    return likeness(node.name, scope.name) >= _ENOUGH


def pairs_by_name(
    place: Place | Pairing, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]
) -> Pairs:
    """Pairs with the most similar names on both sides, and the only numbered ones that are left."""
    ours = _families(nodes, lambda node: nnx_text(node.path[len(place.nnx.path) :]))
    theirs = _families(
        scopes, lambda scope: "/".join(map(str, scope.path[len(place.linen.path) :]))
    )
    # Sequences of different lengths do not correspond.
    scores = {
        (a, b): likeness(a, b) for a in ours for b in theirs if len(ours[a]) == len(theirs[b])
    }
    pairs: Pairs = []
    while scores:
        best = max(scores, key=lambda pair: scores[pair])
        value = scores[best]
        rivals = [p for p in scores if p != best and (p[0] == best[0] or p[1] == best[1])]
        if not value or any(scores[p] >= value for p in rivals):
            break
        pairs += zip(ours.pop(best[0]), theirs.pop(best[1]), strict=True)
        scores = {p: s for p, s in scores.items() if not {*p} & {*best}}
    if len(ours) == len(theirs) == 1:
        (last,), (other,) = ours.values(), theirs.values()
        if len(last) == len(other):
            pairs += zip(last, other, strict=True)
    return pairs


def _families(items: Sequence[Any], text_of: Callable[[Any], str]) -> dict[str, list[Any]]:
    """Items by the words of their names, in the order of their numbers."""
    by_text = {text_of(item): item for item in items}
    return {own[0]: [by_text[text] for text in own] for own in families(by_text).values()}


def _outer_groups(
    candidates: dict[NNXNode, list[LinenNode]],
) -> list[tuple[list[NNXNode], list[LinenNode]]]:
    """As `groups`, without modules that lie inside another one that has candidates."""
    outer = outermost(node for node, scopes in candidates.items() if scopes)
    return groups({node: candidates[node] for node in outer})


def _proposals(pairs: Pairs, evidence: Evidence) -> Proposals:
    return [(node, scope, evidence) for node, scope in pairs]
