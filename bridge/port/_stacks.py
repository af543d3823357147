"""Modules in sequences: by the numbers in their names, and as the layers of a stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bridge._rules.numbers import families, sequence

from ._correspondence import PLAIN, Context, Pairing, Stack
from ._structure import Place, matches, shapes, signature, size, told_apart
from ._trees import LinenNode, N, NNXNode


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
        if automatically_numbered(scopes):
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


def automatically_numbered(scopes: Sequence[LinenNode]) -> set[LinenNode]:
    """The scopes that numbers of automatic names tell from the others."""
    columns = zip(*(scope.lineage for scope in scopes), strict=False)
    varying = [column for column in columns if len({node.path[-1] for node in column}) > 1]
    return {
        scope for n, scope in enumerate(scopes) if any(column[n].is_automatic for column in varying)
    }


def _number(pair: tuple[int, Any]) -> int:
    return pair[0]


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - min(numbers) for number in sorted(numbers)]


def stack_of_list(node: NNXNode, scope: LinenNode, context: Context = PLAIN) -> Stack:
    """The items of an NNX list as the layers of a scope of stacked leaves."""
    return Stack(node, scope, tuple(node.list_items), len(node.path), context=context)


def stack_of_scopes(node: NNXNode, scopes: Sequence[LinenNode], context: Context = PLAIN) -> Stack:
    """Scopes as the layers of an NNX module of stacked leaves."""
    return Stack(node, scopes[0], tuple(scopes), len(node.path) - 1, context=context)


def open_stacks(place: Place, *, by_size: bool = False, deep: bool = True) -> list[Stack]:
    """The stacks below two nodes that still need a counterpart, whatever they are called.

    With `by_size`, layers with arrays of another layout. Without `deep`, only what lies directly
    below the nodes.
    """
    if place.context != PLAIN:
        return []
    lists = [
        node
        for node in _open_lists(place.nnx, place)
        if (deep or node.path[:-1] == place.nnx.path) and _is_uniform(node)
    ]
    # A scope with nothing but another one in it is the same stack.
    cores = dict.fromkeys(scope.core for scope in place.open_below(place.linen, deep=deep))
    nodes = [*place.open_below(place.nnx, deep=by_size)]
    nodes = dict.fromkeys(node.core for node in nodes) if by_size else nodes
    numbered = numbered_scopes(place.open_below(place.linen, deep=by_size))
    found = [stack_of_list(node, scope) for node in lists for scope in cores]
    found += [stack_of_scopes(node, own) for own in numbered for node in nodes]
    fitting = (fitted(each, place.classes, by_size=by_size) for each in found)
    return [each for each in fitting if each.fitting]


def by_nodes(stacks: Iterable[Stack]) -> dict[tuple[NNXNode, LinenNode], Stack]:
    """Stacks by what they pair."""
    return {(each.nnx, each.linen): each for each in stacks}


def leaf_stacks(place: Place) -> list[Stack]:
    """The open leaves that one side has stacked, and the other one by one, by shape."""
    if place.context != PLAIN:
        return []
    scopes = [each for each in _free(place.linen, place) if each.leaves]
    leaves = {
        each: None for each in _free(place.nnx, place) if each.is_variable and not each.is_adapter
    }
    found: list[Stack] = []
    for node in place.nnx.walk():
        items = node.list_items
        for leaf in items[0].walk() if len(items) > 1 else ():
            own = [item.at(leaf.path[len(items[0].path) :]) for item in items]
            same = tuple(each for each in own if each in leaves)
            if len(same) == len(items):
                found += [Stack(leaf, scope, same, len(node.path)) for scope in scopes]
    numbered = [own for own in numbered_scopes(scopes) if not automatically_numbered(own)]
    found += [stack_of_scopes(leaf, own) for own in numbered for leaf in leaves]
    fitting = (fitted(each, place.classes) for each in found)
    return [each for each in fitting if each.fitting and not told_apart(each.nnx, each.linen)]


def _free(node: N, place: Place) -> Iterator[N]:
    """A node and all below it, without what is in a pair."""
    yield node
    for child in node.children.values():
        if place.settled.is_free(child, PLAIN):
            yield from _free(child, place)


def numbered_scopes(scopes: Iterable[LinenNode]) -> Iterator[list[LinenNode]]:
    """Scopes with names that count up; they may be the layers of a stack in that order."""
    by_text = {scope.text: scope for scope in scopes}
    cores: dict[LinenNode, list[LinenNode]] = {}
    for own in families(by_text).values():
        numbers = sequence(own)
        first = min(numbers or [0])
        if len(own) > 1 and numbers == [*range(first, first + len(own))]:
            found = [by_text[text] for text in own]
            cores.setdefault(found[0].core, found)
    yield from cores.values()


def fitted(stack: Stack, classes: frozenset[str], *, by_size: bool = False) -> Stack:
    """A stack with the axes on which the structure of a layer fits, or with `by_size` its size."""

    def fits(layer: Pairing) -> bool:
        context = layer.context
        if layer.nnx.is_leaf:
            return shapes(layer.nnx, context) == shapes(layer.linen, context)
        if by_size:
            ours = size(layer.nnx, context)
            return bool(ours) and ours == size(layer.linen, context)
        return any(matches([layer.nnx], [layer.linen], context, classes).values())

    first = stack.layer(0)
    # Counting leaves is cheap, and says no to nearly all of thousands of pairs.
    is_possible = by_size or first.nnx.is_norm or len(first.nnx.rows) == len(first.linen.rows)
    return stack._replace(fitting=stack.axes(fits) if is_possible else ())


def _is_uniform(node: NNXNode) -> bool:
    """Whether all items of a list have the same structure."""
    found = [signature(item, PLAIN, whole=True) for item in node.list_items]
    return all(each == found[0] for each in found)


def _open_lists(node: NNXNode, place: Place) -> Iterator[NNXNode]:
    """The lists below a module that have no item with a partner yet."""
    for child in node.children.values():
        if child.is_leaf or not place.settled.is_free(child, place.context):
            continue
        items = child.list_items
        is_whole_list = len(items) > 1 and place.settled.is_untouched(child, place.context)
        if is_whole_list and not any(item.is_leaf for item in items):
            yield child
        elif not is_whole_list:
            yield from _open_lists(child, place)


def either(axes: Sequence[int]) -> str:
    """Several axes for a message."""
    return " and ".join(map(str, axes)) + (" both" if len(axes) == 2 else " all")
