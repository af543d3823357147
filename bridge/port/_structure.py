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

from bridge._conversion.neutral import Path
from bridge._layers.table import LEAF_NAMES, is_linen_layer, layer_of_nnx
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._rules.pieces import without_axis

from ._correspondence import Context, Settled
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


def told_apart(node: NNXNode, scope: LinenNode) -> bool:
    """Whether two leaves have different names of leaves of Flax's layers, as scale and bias."""
    return node.name != scope.name and {node.name, scope.name} <= LEAF_NAMES


def has_open_leaf(node: AnyNode, settled: Settled, context: Context) -> bool:
    """Whether a leaf at or below a node still needs a counterpart; without, no module does."""
    return any(settled.is_free(each, context) for each in node.walk() if each.is_leaf)


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
