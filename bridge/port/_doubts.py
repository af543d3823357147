"""Pairs that the traces contradict, without telling what belongs together instead."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from . import _reasons
from ._correspondence import PLAIN, Correspondence, Pairing
from ._orders import Orders
from ._reasons import Evidence
from ._structure import shapes, signature
from ._trees import LinenNode, NNXNode


def doubts(found: Correspondence, orders: Orders) -> Iterator[Pairing]:
    """The pairs that the two models call in another order or use otherwise, with the evidence."""
    if not orders.are_traced:
        return
    alike: dict[Hashable, list[Pairing]] = {}
    for pairing in found.pairings:
        if pairing.evidence.is_disputed:
            yield pairing
        key = pairing.linen.parent, pairing.context, _structure(pairing)
        alike.setdefault(key, []).append(pairing)
    for group in alike.values():
        if orders.contradicts([(each.nnx, each.linen) for each in group]):
            for each in group:
                yield each._replace(proposal=each.evidence & _reasons.DIFFERS)
    for node, scope, _ in found.same_leaves():
        if use := _other_use(node, scope, orders):
            evidence = (_reasons.SAME_SHAPE & use)._replace(is_disputed=True)
            yield Pairing(scope, node, PLAIN, "by name", evidence)


def _structure(pairing: Pairing) -> Hashable:
    if pairing.nnx.is_leaf:
        return frozenset(shapes(pairing.nnx, pairing.context))
    return signature(pairing.nnx, pairing.context)


def _other_use(node: NNXNode, scope: LinenNode, orders: Orders) -> Evidence | None:
    """What two models do otherwise with two leaves of one shape, if traces show it."""
    if orders.is_transposed(node, scope):
        return _reasons.TRANSPOSED
    if {orders.runs_backwards(node), orders.runs_backwards(scope)} == {False, True}:
        return _reasons.BACKWARDS
    if orders.is_cut_otherwise(node, scope):
        return _reasons.CUT_OTHERWISE
    return None
