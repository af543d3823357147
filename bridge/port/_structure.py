"""Compares modules and stacks of the two sides by their structure, whatever they are called.

A module's signature says how many layers it holds and, for each, the collections, names and shapes
of its leaves in Linen's layout. Two modules fit if their signatures agree and the class that an
automatic Linen name such as `Dense_0` tells does not contradict. They are paired only if each of
them fits no other.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from bridge._conversion.neutral import Path
from bridge._layers.table import LEAF_NAMES, is_linen_layer, layer_of_nnx
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._rules.numbers import families, sequence
from bridge._rules.pieces import without_axis

from ._correspondence import PLAIN, Context, Pairing, Settled, Stack
from ._trees import AnyNode, LinenNode, N, NNXNode, Row, class_in

# Of each layer the collections, names and shapes of its leaves, and how many such layers there are.
Signature: TypeAlias = frozenset[tuple[frozenset[tuple[str, str, Any]], int]]


class Place(NamedTuple):
    """Two nodes that belong together, below which something is open.

    `classes` has the names of the classes in the NNX model that are not Flax's own.
    """

    nnx: NNXNode
    linen: LinenNode
    context: Context
    settled: Settled
    classes: frozenset[str]

    def open_below(self, node: N, *, deep: bool) -> Iterator[N]:
        """The modules or scopes below a node that still need a counterpart.

        With `deep`, also those below such nodes, and below nodes that are in parts settled.
        """
        is_norm = node.is_norm
        for key, child in node.children.items():
            if not child.children or not self.settled.is_free(child, self.context):
                continue
            # A norm's layer goes with the norm.
            if is_norm and key == "layer_instance":
                continue
            is_whole = self.settled.is_untouched(child, self.context)
            if is_whole and not (child.is_container or child.is_shared):
                yield child
            if child.is_container or (deep and child.is_open):
                yield from self.open_below(child, deep=deep)

    def candidates(self, *, deep: bool) -> dict[NNXNode, list[LinenNode]]:
        """The Linen scopes that each open NNX module could be."""
        wanted = list(self.open_below(self.nnx, deep=deep))
        found = list(self.open_below(self.linen, deep=deep))
        return matches(wanted, found, self.context, self.classes)


def shape_in(row: Row, context: Context) -> Any:
    """The shape of a leaf as Linen has it, without the axis of stacked layers."""
    shape = without_axis(row.shape, context.of(row.leaf))
    if shape and row.parts > 1:
        shape = (*shape[:-1], shape[-1] // row.parts)
    return shape[-1:] if shape and row.is_vector else shape


def signature(node: AnyNode, context: Context, *, whole: bool = False) -> Signature:
    """The layers of a module or a scope, and how many there are of each.

    With `whole`, the layer that a norm normalises counts too.
    """
    node = node.core
    key = context.of(node), whole
    if key not in node.signatures:
        groups: dict[Path, set[tuple[str, str, Any]]] = {}
        for row in node.rows:
            own = groups.setdefault(row.layer, set())
            own.add((row.collection, row.name, shape_in(row, context)))
        if node.is_norm and not whole:
            groups = {node.path: groups.get(node.path, set())}
        node.signatures[key] = frozenset(Counter(map(frozenset, groups.values())).items())
    return node.signatures[key]


def shapes(node: AnyNode, context: Context) -> Counter[tuple[str, Any]]:
    """How many leaves of each collection and shape there are at and below a node."""
    return Counter((row.collection, shape_in(row, context)) for row in node.rows)


def size(node: AnyNode, context: Context) -> int | None:
    """How many elements the leaves at and below a node have; None if one is no such layer."""
    own = [shape_in(row, context) for row in node.rows]
    return None if (-1,) in own or None in own else sum(map(math.prod, own))


def matches(
    wanted: Sequence[NNXNode],
    found: Sequence[LinenNode],
    context: Context,
    classes: frozenset[str],
) -> dict[NNXNode, list[LinenNode]]:
    """The Linen scopes that each NNX module could be.

    `classes` has the names of all classes in the NNX model.
    """
    cores = {node.core: signature(node, context) for node in wanted}
    scopes = {node.core: signature(node, context) for node in found}
    # Comparing each module with each scope takes seconds for hundreds of blocks.
    alike: dict[Signature, list[tuple[str | None, LinenNode]]] = {}
    for scope, layers in scopes.items():
        named = class_in(scope.name), scope
        alike.setdefault(layers, []).append(named)
    return {
        node: _of_types(node, alike.get(layers, []), classes) if layers else []
        for node, layers in cores.items()
    }


def _of_types(
    node: NNXNode, scopes: Sequence[tuple[str | None, LinenNode]], classes: frozenset[str]
) -> list[LinenNode]:
    """The scopes, each with the class that its name tells, that do not contradict a module's."""
    one_of_each = dict(scopes)
    agreeing = {name for name, one in one_of_each.items() if types_agree(node, one, classes)}
    return [scope for name, scope in scopes if name in agreeing]


def only_pairs(
    candidates: dict[NNXNode, list[LinenNode]],
) -> list[tuple[NNXNode, LinenNode]]:
    """The pairs that fit each other and nothing else."""
    wanted_by = Counter(scope for scopes in candidates.values() for scope in scopes)
    return [
        (node, scopes[0])
        for node, scopes in candidates.items()
        if len(scopes) == 1 and wanted_by[scopes[0]] == 1
    ]


def by_node(pairs: Iterable[tuple[NNXNode, LinenNode]]) -> dict[NNXNode, list[LinenNode]]:
    """The scopes of each NNX node in some pairs."""
    found: dict[NNXNode, list[LinenNode]] = {}
    for node, scope in pairs:
        found.setdefault(node, []).append(scope)
    return found


def told_apart(node: NNXNode, scope: LinenNode) -> bool:
    """Whether two leaves have different names of leaves of Flax's layers, as scale and bias."""
    return node.name != scope.name and {node.name, scope.name} <= LEAF_NAMES


def own_classes(nnx: NNXNode) -> frozenset[str]:
    """The names of the classes in an NNX model that are not Flax's own."""
    classes = {type(node.item) for node in nnx.walk() if node.cls is not None}
    return frozenset(cls.__name__ for cls in classes if layer_of_nnx(cls) is None)


def types_agree(node: NNXNode, scope: LinenNode, classes: frozenset[str]) -> bool:
    """Whether the class that an automatic name tells is one that the NNX module can be."""
    name, own = class_in(scope.name), class_in(node.name)
    if name is None or name == own:
        return True
    if node.is_linen and node.path and node.item is None:
        return own is None or not (is_linen_layer(own) and is_linen_layer(name))
    if node.cls is None or not (is_linen_layer(name) or name in classes):
        return True
    return name in _type_names(node)


def _type_names(node: NNXNode) -> set[str]:
    if isinstance(node.item, ToNNX):
        return {base.__name__ for base in type(node.item.to_nnx__module).__mro__}
    own = {base.__name__ for base in node.cls.__mro__} if node.cls else set()
    return own | (node.layer.linen_names if node.layer else set())


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
        number = operator.itemgetter(0)
        one = sorted(zip(ours, nodes, strict=True), key=number)
        other = sorted(zip(theirs, scopes, strict=True), key=number)
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


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - min(numbers) for number in sorted(numbers)]


def stack_of_list(node: NNXNode, scope: LinenNode, context: Context = PLAIN) -> Stack:
    """The items of an NNX list as the layers of a scope of stacked leaves."""
    return Stack(node, scope, tuple(node.list_items), len(node.path), context=context)


def stack_of_scopes(node: NNXNode, scopes: Sequence[LinenNode], context: Context = PLAIN) -> Stack:
    """Scopes as the layers of an NNX module of stacked leaves."""
    return Stack(node, scopes[0], tuple(scopes), len(node.path) - 1, context=context)


# Stacks by what they pair.
Stacks: TypeAlias = dict[tuple[NNXNode, LinenNode], Stack]


def open_stacks(place: Place, *, by_size: bool = False, deep: bool = True) -> Stacks:
    """The stacks below two nodes that still need a counterpart, whatever they are called.

    With `by_size`, layers with arrays of another layout. Without `deep`, only what lies directly
    below the nodes.
    """
    if place.context != PLAIN:
        return {}
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
    return _fitting(found, place, by_size=by_size)


def leaf_stacks(place: Place) -> Stacks:
    """The open leaves that one side has stacked, and the other one by one, by shape."""
    if place.context != PLAIN:
        return {}
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
    return _fitting([each for each in found if not told_apart(each.nnx, each.linen)], place)


def _fitting(stacks: Iterable[Stack], place: Place, *, by_size: bool = False) -> Stacks:
    found = (fitted(each, place.classes, by_size=by_size) for each in stacks)
    return {(each.nnx, each.linen): each for each in found if each.fitting}


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
