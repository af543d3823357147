"""Modules that could be exchanged but for the numbers in their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ._layers import is_linen_layer
from ._numbers import sequence
from ._trees import LinenNode, NNXNode, nnx_text

# Classes begin with a capital; `layers_0` is an item of a list that `setup` has made.
_CLASS_NAME = re.compile(r"(?P<name>_*[A-Z]\w*)_\d+")


def numbered_pairs(
    candidates: dict[NNXNode, list[LinenNode]],
) -> list[tuple[NNXNode, LinenNode]]:
    """The pairs of modules that could be exchanged, but for the numbers in their names.

    On each side there is one sequence, such as `layer_0 ... layer_49` and `layers.0 ... layers.49`;
    all of one fit all of the other and nothing else; and the numbers go up by the same steps. The
    number of an automatic name such as `Dense_1` counts constructions, and `Dense(4)(Dense(4)(x))`
    constructs the second layer first: such numbers settle nothing, unless they count blocks of the
    program's own and NNX has them in a list.
    """
    found: list[tuple[NNXNode, LinenNode]] = []
    for nodes, scopes in groups(candidates):
        if len(nodes) != len(scopes) or any(len(candidates[n]) != len(scopes) for n in nodes):
            continue
        ours = sequence([nnx_text(node.path) for node in nodes])
        theirs = sequence(["/".join(map(str, scope.path)) for scope in scopes])
        if ours is None or theirs is None or _steps(ours) != _steps(theirs):
            continue
        if counts_constructions(scopes) and not (
            _in_list(nodes)
            and not any(_names_layer(scope) for scope in scopes)
            and not _made_in_another_order(scopes, theirs)
        ):
            continue
        one = sorted(zip(ours, nodes, strict=True), key=_number)
        other = sorted(zip(theirs, scopes, strict=True), key=_number)
        found += [(node, scope) for (_, node), (_, scope) in zip(one, other, strict=True)]
    return found


def groups(
    candidates: dict[NNXNode, list[LinenNode]],
) -> list[tuple[list[NNXNode], list[LinenNode]]]:
    """The modules and scopes that are connected by candidates, each group by itself."""
    found: list[tuple[list[NNXNode], list[LinenNode]]] = []
    for node, scopes in candidates.items():
        if not scopes:
            continue
        own = {id(scope) for scope in scopes}
        connected = [group for group in found if any(id(scope) in own for scope in group[1])]
        nodes = [each for group in connected for each in group[0]] + [node]
        every = [scope for group in connected for scope in group[1]] + list(scopes)
        found = [group for group in found if not any(group is other for other in connected)]
        found.append((nodes, list({id(scope): scope for scope in every}.values())))
    return found


def counts_constructions(scopes: Sequence[LinenNode]) -> bool:
    """Whether the numbers in which scopes differ are those of automatic names."""
    keys = zip(*(scope.path for scope in scopes), strict=False)
    varying = [{str(key) for key in column} for column in keys if len({*column}) > 1]
    return any(_CLASS_NAME.fullmatch(key) for column in varying for key in column)


def _names_layer(scope: LinenNode) -> bool:
    """Whether the automatic name of a layer of Flax's is on a path."""
    found = (_CLASS_NAME.fullmatch(str(key)) for key in scope.path)
    return any(is_linen_layer(match["name"]) for match in found if match)


def _made_in_another_order(scopes: Sequence[LinenNode], numbers: Sequence[int]) -> bool:
    """Whether the order in which `init` made variables is known, and is not that of the numbers."""
    parents = {id(scope.parent): scope.parent for scope in scopes}
    if len(parents) != 1:
        return False
    (parent,) = parents.values()
    by_name = {str(scope.path[-1]): n for scope, n in zip(scopes, numbers, strict=True)}
    given = [name for name in (parent.children if parent else ()) if name in by_name]
    # Sorted names are those of a checkpoint, or of a jitted `init`, and tell nothing.
    return given != sorted(given) and given != sorted(given, key=lambda name: by_name[name])


def _in_list(nodes: Sequence[NNXNode]) -> bool:
    keys = zip(*(node.path for node in nodes), strict=False)
    varying = [column for column in keys if len({*column}) > 1]
    return len(varying) == 1 and all(isinstance(key, int) for key in varying[0])


def _number(pair: tuple[int, Any]) -> int:
    return pair[0]


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - min(numbers) for number in sorted(numbers)]
