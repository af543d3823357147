"""Pairs modules by their names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bridge._rules.numbers import families

from ._correspondence import Pairing
from ._names import likeness
from ._orders import Pairs
from ._structure import Place
from ._trees import LinenNode, NNXNode, nnx_text

# How much of two names has to be alike for two things to be the same.
_ENOUGH = 0.5


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
