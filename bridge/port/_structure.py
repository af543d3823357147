"""Compares modules of the two sides by their structure, whatever they are called.

A module's signature says how many layers it holds and, for each, the collections, names and shapes
of its leaves in Linen's layout. Two modules fit if their signatures agree and the class that an
automatic Linen name such as `Dense_0` tells does not contradict. They are paired only if each of
them fits no other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Path
from bridge._layers.table import LEAF_NAMES, is_linen_layer, layer_of_nnx
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._rules.pieces import without_axis

from ._correspondence import Context, Settled
from ._trees import CACHE, AnyNode, InCollection, LinenNode, N, NNXNode, class_in

# Of a leaf as Linen has it: the layer, the collection, the name in the layer, and the shape without
# the axis of stacked layers.
Row: TypeAlias = tuple[Path, str, str, Any]
Signature: TypeAlias = Counter[frozenset[tuple[str, str, Any]]]


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


def weights(node: AnyNode, context: Context) -> Iterator[Row]:
    """The leaves at and below a node of either side, in Linen's layout."""
    if isinstance(node, NNXNode):
        if node.is_leaf:
            yield node.path[:-1], _collection(node), node.name, _shape(node, context)
        else:
            yield from _in_linen_layout(node, context)
    else:
        for each in node.walk():
            for collection, leaf in each.leaves.items():
                if collection != CACHE:
                    shape = without_axis(shape_of(leaf.value), context.linen)
                    # A norm's `Dense_0/kernel/u`: the layer's name differs between the sides.
                    name = str(each.path[-1]) if each.path else ""
                    name = name[name.find("/") :] if "/" in name else name
                    yield each.path[:-1], collection, name, shape


def signature(node: N, context: Context, *, whole: bool = False) -> Signature:
    """The layers of a module or a scope.

    With `whole`, the layer that a norm normalises counts too.
    """
    node = node.core
    groups: dict[Path, set[tuple[str, str, Any]]] = {}
    for row in weights(node, context):
        groups.setdefault(row[0], set()).add(row[1:])
    if node.is_norm and not whole:
        groups = {node.path: groups.get(node.path, set())}
    return Counter(map(frozenset, groups.values()))


def shapes(node: AnyNode, context: Context) -> Counter[tuple[str, Any]]:
    """How many leaves of each collection and shape there are at and below a node."""
    return Counter((collection, shape) for _, collection, _, shape in weights(node, context))


def size(node: AnyNode, context: Context) -> int | None:
    """How many elements the leaves at and below a node have; None if one is no such layer."""
    own = [shape for *_, shape in weights(node, context)]
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
    alike: dict[frozenset[Any], list[tuple[str | None, LinenNode]]] = {}
    for scope, layers in scopes.items():
        named = class_in(scope.name), scope
        alike.setdefault(frozenset(layers.items()), []).append(named)
    return {
        node: _of_types(node, alike.get(frozenset(layers.items()), []), classes) if layers else []
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


def told_apart(node: NNXNode, scope: LinenNode) -> bool:
    """Whether two leaves have different names of leaves of Flax's layers, as scale and bias."""
    return node.name != scope.name and {node.name, scope.name} <= LEAF_NAMES


def has_open_leaf(node: AnyNode, settled: Settled, context: Context) -> bool:
    """Whether a leaf at or below a node still needs a counterpart; without, no module does."""
    return any(settled.is_free(each, context) for each in node.walk() if each.is_leaf)


def _in_linen_layout(
    node: NNXNode, context: Context, taken: frozenset[NNXNode] = frozenset()
) -> Iterator[Row]:
    layer = node.layer
    if node.is_norm:
        for path, name, leaf in node.leaves_by_path():
            # In some versions of Flax a scale is a bare array in NNX.
            collection = (leaf.is_variable and leaf.collection) or "params"
            text = "/".join(["", *map(str, path), name])
            yield node.path, collection, text, _shape(leaf, context)
        yield from _in_linen_layout(node.children["layer_instance"], context)
        return
    last: Any = None
    for path, parts in layer.linen_of_path.items() if layer is not None else ():
        if (leaf := node.at(path)) is not None:
            taken |= {leaf}
            shape = _shape(leaf, context)
            if len(parts) > 1:
                shape = (*shape[:-1], shape[-1] // len(parts))
            last = shape[-1:]
            for part in parts:
                yield (*node.path, *part[:-1]), _collection(leaf), part[-1], shape
    for path in layer.zero if layer is not None else ():
        *group, name = path.split("/")
        yield (*node.path, *group), "params", name, last
    own = {*node.weights.values()} - taken
    for key, child in node.children.items():
        if not child.is_leaf:
            yield from _in_linen_layout(child, context, taken)
        elif node.is_linen and child.collection != CACHE:
            group, name = node.path, str(key)
            if isinstance(key, InCollection):
                group, name = node.path[:-1], node.name
            yield group, child.collection or "", name, _shape(child, context)
        elif not node.is_linen and child in own:
            name = layer.linen_of_name.get(str(key)) if layer is not None else None
            yield node.path, _collection(child), name or str(key), _shape(child, context)


def _collection(leaf: NNXNode) -> str:
    return "params" if leaf.is_param else leaf.collection or ""


def _shape(leaf: NNXNode, context: Context) -> Any:
    return without_axis(shape_of(leaf.value), context.nnx)


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
