"""Compares the orders in which two models use their leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from bridge._conversion.arrays import shape_of

from ._correspondence import Stack
from ._trees import LinenNode, NNXNode
from ._uses import Order, bit_of

Pairs: TypeAlias = list[tuple[NNXNode, LinenNode]]


class Orders(NamedTuple):
    """In which order the two models use their leaves."""

    nnx: Order
    linen: Order

    @property
    def are_traced(self) -> bool:
        return bool(self.nnx.ranks and self.linen.ranks)

    def told(self, pairs: Sequence[tuple[NNXNode, LinenNode]]) -> list[bool]:
        """Of each pair, whether the results that calls use of each other's leave no other one.

        Calls that use no results of each other could be in any order, so theirs tells nothing.
        """
        before = self._before([node for node, _ in pairs])
        if before != self._before([scope for _, scope in pairs]):
            return [False] * len(pairs)
        places = _places(before)
        return [places.count(place) == 1 for place in places]

    def chain(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Pairs | None:
        """The only pairs for which both traces show the same calls; None if there are several."""
        ours = dict(zip(_places(self._before(nodes)), nodes, strict=True))
        theirs = dict(zip(_places(self._before(scopes)), scopes, strict=True))
        if not len(nodes) == len(ours) == len(scopes) or ours.keys() != theirs.keys():
            return None
        pairs = [(ours[place], theirs[place]) for place in sorted(ours, reverse=True)]
        return pairs if all(self.told(pairs)) else None

    def contradicts(self, pairs: Sequence[tuple[NNXNode, LinenNode]]) -> bool:
        """Whether one model needs a result of one pair for another, and the other the reverse."""
        before = self._before([node for node, _ in pairs])
        others = self._before([scope for _, scope in pairs])
        every = range(len(pairs))
        return any(before[a][b] and others[b][a] for a in every for b in every)

    def in_order(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Pairs | None:
        """The pairs in the order of both models; None if that is not known of all."""
        ours = [(self.rank(node), n) for n, node in enumerate(nodes)]
        theirs = [(self.rank(scope), n) for n, scope in enumerate(scopes)]
        ranks = [rank for rank, _ in (*ours, *theirs)]
        if len(ours) != len(theirs) or None in ranks:
            return None
        one, other = (sorted((rank or 0, n) for rank, n in each) for each in (ours, theirs))
        return [(nodes[a], scopes[b]) for (_, a), (_, b) in zip(one, other, strict=True)]

    def _of(self, item: NNXNode | LinenNode) -> Order:
        return self.nnx if isinstance(item, NNXNode) else self.linen

    def _bits(self, item: NNXNode | LinenNode) -> tuple[int, int]:
        """(the ranks of an item's leaves, those of what their first uses need), as bits."""
        order, used, needed = self._of(item), 0, 0
        for key in item.below:
            if key in order.ranks:
                used |= bit_of(order.ranks[key])
                needed |= order.after.get(key, 0)
        return used, needed

    def _before(self, items: Sequence[NNXNode] | Sequence[LinenNode]) -> list[list[bool]]:
        """Of each module and each other one, whether it precedes it."""
        bits = [self._bits(item) for item in items]
        return [[_precedes(a, b) for b in bits] for a in bits]

    def rank(self, item: NNXNode | LinenNode) -> int | None:
        """The rank of the leaf of a module that is used first."""
        ranks = [self._of(item).ranks.get(key) for key in item.below]
        return min((rank for rank in ranks if rank is not None), default=None)

    def axes(self, node: NNXNode, scope: LinenNode) -> Iterator[tuple[int, str]]:
        """(the axis on which a scan takes a stack apart, the library that shows it)."""
        for item, library in ((scope, "Linen"), (node, "NNX")):
            layers = self._of(item).layers
            found = [(layers.get(key), value) for key, value in item.below.items()]
            axes = {axis for axis, _ in found}
            if len(axes) > 1 and None not in axes:
                axes = {(axis or 0) - len(shape_of(value) or ()) for axis, value in found}
            if len(axes) == 1 and (axis := axes.pop()) is not None:
                yield axis, library

    def runs_backwards(self, item: NNXNode | LinenNode) -> bool | None:
        """Whether a scan takes the last layer of stacked leaves first; None if none is seen."""
        order = self._of(item)
        found = {key in order.backwards for key in item.below if key in order.layers}
        return found.pop() if len(found) == 1 else None

    def layer_numbers(self, stack: Stack) -> list[int] | None:
        """Which layer of a stack each of its items is, in the order of the calls.

        None unless the items are called in a chain and a scan goes over the stack.
        """
        is_backwards = self.runs_backwards(stack.linen if stack.is_list else stack.nnx)
        places = [sum(column) for column in zip(*self._before(stack.items), strict=True)]
        if is_backwards is None or sorted(places) != [*range(len(places))]:
            return None
        return [len(places) - 1 - place if is_backwards else place for place in places]

    def is_transposed(self, node: NNXNode, scope: LinenNode) -> bool | None:
        """Whether the models sum over different axes of a leaf; None if no trace tells it."""
        ours, theirs = self.uses(node), self.uses(scope)
        if ours is None or theirs is None:
            return None
        return [use == "sum" for use in ours] != [use == "sum" for use in theirs]

    def is_cut_otherwise(self, node: NNXNode, scope: LinenNode) -> bool:
        """Whether the models take a product of a leaf apart at indices that exclude each other."""
        ours = self.nnx.cuts.get(node.path, frozenset())
        found = [self.linen.cuts.get(address, frozenset()) for address in scope.below]
        return any(not (ours <= theirs or theirs <= ours) for theirs in found)

    def uses(self, leaf: NNXNode | LinenNode) -> tuple[str, ...] | None:
        """What a model does along each axis of a leaf; None if no trace shows a product of it."""
        order = self._of(leaf)
        key = next((key for key in leaf.below if key in order.summed), None)
        if key is None:
            return None
        rank = len(shape_of(leaf.below[key]) or ())
        found = ["sum" if n in order.summed[key] else "" for n in range(rank)]
        if (layers := order.layers.get(key)) is not None:
            found[layers] = "layers"
        return tuple(found)

    def products(self, leaf: NNXNode | LinenNode) -> tuple[int, ...]:
        """The axes into which a model takes a product of a leaf apart; none without a trace."""
        found = (self._of(leaf).products.get(key) for key in leaf.below)
        return next(filter(None, found), ())


def _places(before: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """The place of each module in the partial order of the calls, from how many are around it."""
    return [(sum(row), sum(other[n] for other in before)) for n, row in enumerate(before)]


def _precedes(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a module uses a result of another's, and not the reverse, from their bits."""
    return bool(other[1] & one[0]) and not one[1] & other[0]
