"""What speaks for putting two modules or leaves together: names, numbers, the order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bridge._neutral import Address, Path

from ._context import Context
from ._correspondence import Evidence, Pairing
from ._names import likeness
from ._numbers import families
from ._order import Order
from ._places import Place, Proposals
from ._sequences import counts_constructions, groups, is_automatic
from ._structure import is_adapter, linen_shapes, nnx_shapes, open_modules, open_scopes, types_agree
from ._trees import LinenNode, NNXNode, nnx_text
from ._uses import bit_of

_Pairs = list[tuple[NNXNode, LinenNode]]
_ANY_ORDER = "some of the calls do not use each other's results, so any order would do"
_CONSTRUCTIONS = "automatic numbers count constructions, not calls"
# How much of two modules has to be alike before they are proposed to be the same.
_ENOUGH = 0.5


class Orders(NamedTuple):
    """In which order the two models use their leaves.

    Attributes:
      nnx: the order of NNX paths.
      linen: the order of Linen addresses, empty if nothing tells one.
      nnx_text: how the order of the NNX model is known.
      linen_text: how that of the Linen model is.
      nnx_is_traced: whether a trace showed the order of the NNX model.
      linen_is_traced: whether one showed that of the Linen model.
    """

    nnx: Order
    linen: Order
    nnx_text: str
    linen_text: str
    nnx_is_traced: bool
    linen_is_traced: bool

    @property
    def text(self) -> str:
        if self.are_traced:
            return "the order of calls in both models"
        return f"{self.nnx_text} and {self.linen_text}"

    @property
    def are_traced(self) -> bool:
        return self.nnx_is_traced and self.linen_is_traced

    def told(self, pairs: Sequence[tuple[NNXNode, LinenNode]]) -> list[bool]:
        """Of each pair, whether the results that calls use of each other's leave no other one.

        Calls that use no results of each other could be in any order, so theirs tells nothing.
        """
        ours = [_bits(self.nnx, _paths(node)) for node, _ in pairs]
        theirs = [_bits(self.linen, _addresses(scope)) for _, scope in pairs]
        before, others = (
            [[_precedes(a, b) for b in each] for a in each] for each in (ours, theirs)
        )
        if before != others:
            return [False] * len(pairs)
        # In the partial order of the calls a place with counts of its own is like no other.
        places = [(sum(before[n]), sum(row[n] for row in before)) for n in range(len(pairs))]
        return [places.count(place) == 1 for place in places]


class ByEvidence:
    """Proposes what belongs together where structure leaves several candidates.

    Args:
      orders: the orders of the two models.
    """

    def __init__(self, orders: Orders, known: Sequence[Pairing] = ()):
        self._orders = orders
        # Blocks of one class are alike inside, so one that is clear tells about the others.
        self._elsewhere: dict[tuple[type | None, str], set[str]] = {}
        for pairing in known:
            name = str(pairing.nnx.path[-1]) if pairing.nnx.path else ""
            if pairing.linen.path and pairing.parent is not None:
                key = pairing.parent.cls, name
                self._elsewhere.setdefault(key, set()).add(str(pairing.linen.path[-1]))

    def confirms(self, pairs: Sequence[tuple[NNXNode, LinenNode]], context: Context) -> bool:
        """Whether the order of calls, where a trace tells it, is that of the numbers."""
        del context
        if not self._orders.nnx_is_traced:
            return True
        ranks = [(self._nnx_rank(node), self._linen_rank(scope)) for node, scope in pairs]
        if any(None in rank for rank in ranks):
            return True
        theirs = [rank for _, rank in sorted(ranks, key=lambda each: each[0] or 0)]
        if theirs == sorted(theirs, key=lambda rank: rank or 0):
            return True
        # Calls that could be in any order contradict nothing.
        if not self._orders.are_traced:
            return False
        nodes, scopes = [node for node, _ in pairs], [scope for _, scope in pairs]
        return not any(self._orders.told(self._by_order(nodes, scopes) or []))

    def axis(self, node: NNXNode, scope: LinenNode) -> tuple[int | None, Evidence]:
        """See `Proposer`."""
        orders = self._orders
        ours = {orders.nnx.axes.get(path) for path in _paths(node)}
        theirs = {orders.linen.axes.get(address) for address in _addresses(scope)}
        for found, library in ((theirs, "Linen"), (ours, "NNX")):
            if len(found) == 1 and None not in found:
                text = f"the axis of the scan that a trace of the {library} model shows"
                return next(iter(found)), Evidence(text)
        return None, Evidence("", is_weak=True)

    def modules(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """See `Proposer`."""
        weak: Proposals = []
        for nodes, scopes in groups(_outermost(candidates)):
            proposals = self._together(place, nodes, scopes)
            if proposals and not any(evidence.is_weak for _, _, evidence in proposals):
                return proposals
            # What is clear leaves fewer candidates for the rest, so it comes first.
            weak = weak or proposals
        return weak or self._alike(place)

    def leaves(self, place: Place) -> Proposals:
        """See `Proposer`."""
        nodes = [
            child
            for child in place.nnx.children.values()
            if child.is_leaf
            and child.is_variable
            and not is_adapter(child)
            and place.settled.is_free(child, place.context)
        ]
        scopes = [
            child
            for child in place.linen.children.values()
            if child.leaves and place.settled.is_free(child, place.context)
        ]
        candidates = {
            node: [
                scope
                for scope in scopes
                if nnx_shapes(node, place.context) == linen_shapes(scope, place.context)
            ]
            for node in nodes
        }
        return [
            pair
            for own, others in groups(candidates)
            for pair in self._together(place, own, others, "the same shape")
        ]

    def _together(
        self,
        place: Place,
        nodes: Sequence[NNXNode],
        scopes: Sequence[LinenNode],
        only: str = "nothing else is left",
    ) -> Proposals:
        """Pairs of modules that could all be exchanged."""
        if len(nodes) == len(scopes) == 1:
            return [(nodes[0], scopes[0], Evidence(only))]
        by_order = self._by_order(nodes, scopes)
        by_name = _by_name(place, nodes, scopes)
        # Names that a program chose say more than an order: query, key and value may be computed in
        # any. Automatic ones say less: they number the constructions.
        names_count = any(not is_automatic(scope, scopes) for _, scope in by_name)
        if by_order is not None:
            named = {id(node): scope for node, scope in by_name}
            agree = all(named.get(id(node), scope) is scope for node, scope in by_order)
            if agree or not names_count:
                text = self._orders.text + (" and names" if agree and names_count else "")
                return self._ordered(by_order, text, by_name if agree and names_count else [])
        if by_name:
            text = "their names"
            if by_order is not None and not (
                self._orders.are_traced and not any(self._orders.told(by_order))
            ):
                text += "; the order of calls differs"
            elif any(is_automatic(scope, scopes) for _, scope in by_name):
                text += f"; {_CONSTRUCTIONS}"
            return _proposals(by_name, Evidence(text, text != "their names"))
        found = self._by_numbers(nodes, scopes) or self._by_rank(nodes, scopes)
        return found or self._as_elsewhere(place, nodes, scopes)

    def _as_elsewhere(
        self, place: Place, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]
    ) -> Proposals:
        """As the same names were put together in another module of the same class."""
        by_name = {str(scope.path[-1]): scope for scope in scopes}
        pairs: _Pairs = []
        for node in nodes:
            names = self._elsewhere.get((place.nnx.cls, str(node.path[-1])), set())
            known = [by_name[name] for name in names if name in by_name]
            if len(names) == len(known) == 1:
                pairs.append((node, known[0]))
        text = f"as in another {place.nnx.cls.__name__}" if place.nnx.cls else ""
        is_clear = place.nnx.cls is not None and len({id(scope) for _, scope in pairs}) == len(
            pairs
        )
        return _proposals(pairs, Evidence(text, is_weak=True)) if is_clear else []

    def _by_numbers(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Proposals:
        ours = families(nnx_text(node.path) for node in nodes)
        theirs = families(map(_text, scopes))
        if len(nodes) != len(scopes) or len(ours) != 1 or len(theirs) != 1:
            return []
        pairs = _in_order(nodes, scopes)
        is_weak = counts_constructions(scopes)
        text = "numbers in the same order"
        if is_weak:
            text += f"; {_CONSTRUCTIONS}"
        return _proposals(pairs, Evidence(text, is_weak))

    def _by_rank(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Proposals:
        """By the order of the NNX model and the numbers of one sequence of Linen names."""
        by_text = {_text(scope): scope for scope in scopes}
        sequences = families(by_text)
        if len(nodes) != len(scopes) or len(sequences) != 1:
            return []
        ranked = sorted(nodes, key=lambda node: self._nnx_rank(node) or 0)
        (own,) = sequences.values()
        pairs = list(zip(ranked, (by_text[text] for text in own), strict=True))
        text = f"{self._orders.nnx_text} and the numbers of the Linen names"
        return _proposals(pairs, Evidence(text, is_weak=True))

    def _ordered(self, pairs: _Pairs, text: str, named: _Pairs) -> Proposals:
        """Proposals by the order of calls, weak where it could be another and no name tells."""
        if not self._orders.are_traced:
            return _proposals(pairs, Evidence(text, is_weak=True))
        names = {
            id(node) for node, scope in named if not is_automatic(scope, [s for _, s in pairs])
        }
        proposals: Proposals = []
        for pair, is_told in zip(pairs, self._orders.told(pairs), strict=True):
            if is_told or id(pair[0]) in names:
                proposals.append((*pair, Evidence(text)))
            else:
                proposals.append((*pair, Evidence(f"{text}; {_ANY_ORDER}", is_weak=True)))
        return proposals

    def _by_order(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> _Pairs | None:
        """The pairs in the order of both models; None if that is not known of all."""
        ours = [(self._nnx_rank(node), n) for n, node in enumerate(nodes)]
        theirs = [(self._linen_rank(scope), n) for n, scope in enumerate(scopes)]
        ranks = [rank for rank, _ in (*ours, *theirs)]
        if len(ours) != len(theirs) or None in ranks:
            return None
        one, other = (sorted((rank or 0, n) for rank, n in each) for each in (ours, theirs))
        return [(nodes[a], scopes[b]) for (_, a), (_, b) in zip(one, other, strict=True)]

    def _alike(self, place: Place) -> Proposals:
        """The two open modules that are most alike, if their leaves are not all the same.

        A module whose own parameters have other names, or that lacks one, has no candidates.
        """
        context = place.context
        nodes = list(open_modules(place.nnx, place.settled, context, deep=False))
        scopes = list(open_scopes(place.linen, place.settled, context, deep=False))
        ours = {id(node): nnx_shapes(node, context) for node in nodes}
        theirs = {id(scope): linen_shapes(scope, context) for scope in scopes}
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
                found = self._together(place, own, others, text)
                if found:
                    return [(n, s, Evidence(_joined(text, e.text), True)) for n, s, e in found]
        return []

    def _nnx_rank(self, node: NNXNode) -> int | None:
        ranks = [self._orders.nnx.ranks.get(path) for path in _paths(node)]
        return min((rank for rank in ranks if rank is not None), default=None)

    def _linen_rank(self, scope: LinenNode) -> int | None:
        ranks = [self._orders.linen.ranks.get(address) for address in _addresses(scope)]
        return min((rank for rank in ranks if rank is not None), default=None)


def _paths(node: NNXNode) -> list[Path]:
    return [each.path for each in node.walk() if each.is_leaf]


def _addresses(scope: LinenNode) -> list[Address]:
    return [(collection, each.path) for each in scope.walk() for collection in each.leaves]


def _precedes(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a module uses a result of another's, and not the reverse, from their `_bits`."""
    return bool(other[1] & one[0]) and not one[1] & other[0]


def _bits(order: Order, keys: Sequence[Any]) -> tuple[int, int]:
    """(the ranks of leaves, those of what their first uses need), as bits."""
    used, needed = 0, 0
    for key in keys:
        if key in order.ranks:
            used |= bit_of(order.ranks[key])
            needed |= order.after.get(key, 0)
    return used, needed


def _by_name(place: Place, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> _Pairs:
    """Pairs whose names are more alike than any other of either's, and what is left by them."""
    ours = _families(nodes, lambda node: nnx_text(node.path[len(place.nnx.path) :]))
    theirs = _families(
        scopes, lambda scope: "/".join(map(str, scope.path[len(place.linen.path) :]))
    )
    # Sequences of other lengths are not each other.
    scores = {
        (a, b): likeness(a, b) for a in ours for b in theirs if len(ours[a]) == len(theirs[b])
    }
    pairs: _Pairs = []
    while scores:
        best = max(scores, key=lambda pair: scores[pair])
        value = scores[best]
        rivals = [p for p in scores if p != best and (p[0] == best[0] or p[1] == best[1])]
        if not value or any(scores[p] >= value for p in rivals):
            break
        pairs += zip(ours.pop(best[0]), theirs.pop(best[1]), strict=True)
        scores = {p: s for p, s in scores.items() if not {*p} & {*best}}
    if pairs and len(ours) == len(theirs) == 1:
        (last,), (other,) = ours.values(), theirs.values()
        if len(last) == len(other):
            pairs += zip(last, other, strict=True)
    return pairs


def _families(items: Sequence[Any], text_of: Callable[[Any], str]) -> dict[str, list[Any]]:
    """Items by the words of their names, in the order of their numbers."""
    by_text = {text_of(item): item for item in items}
    return {own[0]: [by_text[text] for text in own] for own in families(by_text).values()}


def _in_order(nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> _Pairs:
    ours = {nnx_text(node.path): node for node in nodes}
    theirs = {_text(scope): scope for scope in scopes}
    (one,), (other,) = families(ours).values(), families(theirs).values()
    return [(ours[a], theirs[b]) for a, b in zip(one, other, strict=True)]


def _outermost(candidates: dict[NNXNode, list[LinenNode]]) -> dict[NNXNode, list[LinenNode]]:
    """Without modules that lie inside of another one that has candidates."""
    paths = {node.path for node, scopes in candidates.items() if scopes}
    return {
        node: scopes
        for node, scopes in candidates.items()
        if scopes and not any(node.path[:n] in paths for n in range(len(node.path)))
    }


def _proposals(pairs: _Pairs, evidence: Evidence) -> Proposals:
    return [(node, scope, evidence) for node, scope in pairs]


def _share(ours: Counter[Any], theirs: Counter[Any]) -> float:
    """How many of the leaves of two modules have the same shape, from 0 to 1."""
    either = sum((ours | theirs).values())
    return sum((ours & theirs).values()) / either if either else 0.0


def _joined(*texts: str) -> str:
    return "; ".join(dict.fromkeys(texts))


def _text(scope: LinenNode) -> str:
    return "/".join(map(str, scope.path))
