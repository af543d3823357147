"""Modules that could be exchanged but for the numbers in their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge._rules.numbers import sequence

from ._trees import LinenNode, NNXNode


def numbered_pairs(candidates: dict[NNXNode, list[LinenNode]]) -> list[tuple[NNXNode, LinenNode]]:
    """The pairs of modules that could be exchanged, but for the numbers in their names.

    On each side there is one sequence, such as `layer_0 ... layer_49` and `layers.0 ... layers.49`;
    all of one fit all of the other and nothing else; and the numbers go up by the same steps. The
    number of an automatic name such as `Dense_1` counts constructions, and `Block()(Block()(x))`
    constructs the second block first: such numbers settle nothing.
    """
    found: list[tuple[NNXNode, LinenNode]] = []
    for nodes, scopes in groups(candidates):
        if len(nodes) != len(scopes) or any(len(candidates[n]) != len(scopes) for n in nodes):
            continue
        ours = sequence([node.text for node in nodes])
        theirs = sequence([scope.text for scope in scopes])
        if ours is None or theirs is None or _steps(ours) != _steps(theirs):
            continue
        if counts_constructions(scopes):
            continue
        one = sorted(zip(ours, nodes, strict=True), key=_number)
        other = sorted(zip(theirs, scopes, strict=True), key=_number)
        found += [(node, scope) for (_, node), (_, scope) in zip(one, other, strict=True)]
    return found


def groups(
    candidates: dict[NNXNode, list[LinenNode]],
) -> list[tuple[list[NNXNode], list[LinenNode]]]:
    """The modules and scopes that are connected by candidates, each group by itself."""
    # Modules of one structure have the same scopes, hundreds of them in a deep model.
    alike: dict[tuple[LinenNode, ...], list[NNXNode]] = {}
    for node, scopes in candidates.items():
        if scopes:
            alike.setdefault(tuple(scopes), []).append(node)
    found: list[tuple[list[NNXNode], dict[LinenNode, None]]] = []
    for scopes, nodes in alike.items():
        group = nodes, dict.fromkeys(scopes)
        apart = [each for each in found if each[1].keys().isdisjoint(scopes)]
        for each in (each for each in found if each not in apart):
            group = each[0] + group[0], each[1] | group[1]
        found = [*apart, group]
    return [(nodes, [*scopes]) for nodes, scopes in found]


def counts_constructions(scopes: Sequence[LinenNode]) -> bool:
    """Whether the numbers in which scopes differ are those of automatic names."""
    columns = zip(*(scope.lineage for scope in scopes), strict=False)
    varying = [column for column in columns if len({node.path[-1] for node in column}) > 1]
    return any(node.is_automatic for column in varying for node in column)


def is_automatic(scope: LinenNode, others: Sequence[LinenNode]) -> bool:
    """Whether an automatic name tells a scope from others."""
    if scope.is_automatic:
        return True
    columns = zip(scope.lineage, *(other.lineage for other in others), strict=False)
    told = [column[0] for column in columns if len({node.path[-1] for node in column}) > 1]
    return any(node.is_automatic for node in told)


def _number(pair: tuple[int, Any]) -> int:
    return pair[0]


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - min(numbers) for number in sorted(numbers)]
