"""Compares modules of the two sides by their structure, whatever they are called.

A module's signature says how many layers it holds and, for each, the collections, names and shapes
of its leaves in Linen's layout. Two modules fit if their signatures agree and the class that an
automatic Linen name such as `Dense_0` tells does not contradict. They are paired only if each of
them fits no other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Path
from bridge._layers.table import is_linen_layer, layer_of_nnx
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._rules.pieces import without_axis

from ._correspondence import Context, Settled
from ._numbers import numbered
from ._trees import InCollection, LinenNode, NNXNode

Signature = Counter[frozenset[tuple[str, str, Any]]]
_AUTOMATIC = re.compile(r"([A-Za-z]\w*)_\d+")


class Place(NamedTuple):
    """Two nodes that belong together, below which something is open.

    Attributes:
      nnx: the NNX node.
      linen: the Linen node.
      context: which of several stacked layers they are.
      settled: the nodes that are spoken for.
      classes: the names of the classes in the NNX model that are not Flax's own.
    """

    nnx: NNXNode
    linen: LinenNode
    context: Context
    settled: Settled
    classes: frozenset[str]


def nnx_signature(node: NNXNode, context: Context) -> Signature:
    """The layers of an NNX module in Linen's layout."""
    groups: dict[Path, set[tuple[str, str, Any]]] = {}
    for group, collection, name, shape in _linen_form(node, context):
        groups.setdefault(group, set()).add((collection, name, shape))
    return Counter(frozenset(group) for group in groups.values())


def linen_signature(node: LinenNode, context: Context) -> Signature:
    """The layers of a Linen scope."""
    signature: Signature = Counter()
    for scope in node.walk():
        own = _own_leaves(scope, context)
        if own:
            signature[own] += 1
    return signature


def matches(
    wanted: Sequence[NNXNode],
    found: Sequence[LinenNode],
    context: Context,
    classes: frozenset[str],
) -> dict[NNXNode, list[LinenNode]]:
    """The Linen scopes that each NNX module could be.

    Args:
      wanted: NNX modules.
      found: Linen scopes.
      context: whether they are stacked.
      classes: the names of all classes in the NNX model.
    """
    cores = {nnx_core(node): nnx_signature_of_pair(node, context) for node in wanted}
    scopes = {linen_core(node): linen_signature_of_pair(node, context) for node in found}
    # Comparing each module with each scope takes seconds for hundreds of blocks.
    alike: dict[frozenset[Any], list[tuple[str | None, LinenNode]]] = {}
    for scope, signature in scopes.items():
        named = automatic_class(scope), scope
        alike.setdefault(frozenset(signature.items()), []).append(named)
    return {
        node: _of_types(node, alike.get(frozenset(signature.items()), []), classes)
        if signature
        else []
        for node, signature in cores.items()
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
    """The pairs whose two sides fit nothing else."""
    wanted_by = Counter(scope for scopes in candidates.values() for scope in scopes)
    return [
        (node, scopes[0])
        for node, scopes in candidates.items()
        if len(scopes) == 1 and wanted_by[scopes[0]] == 1
    ]


def has_open_leaf(node: NNXNode | LinenNode, settled: Settled, context: Context) -> bool:
    """Whether a leaf at or below a node still needs a counterpart; without, no module does."""
    return any(settled.is_free(each, context) for each in node.walk() if each.is_leaf)


def open_modules(
    node: NNXNode, settled: Settled, context: Context, *, deep: bool
) -> Iterator[NNXNode]:
    """The NNX modules below a node that still need a counterpart.

    Args:
      node: a module.
      settled: the nodes that are spoken for.
      context: which of several stacked layers the module is.
      deep: whether also those below such modules, and below modules that are in parts settled.
    """
    for key, child in node.children.items():
        if child.is_leaf or not settled.is_free(child, context):
            continue
        # A norm's layer goes with the norm.
        if node.is_norm and key == "layer_instance":
            continue
        if not (child.is_container or child.is_shared) and _is_untouched(child, settled, context):
            yield child
        if child.is_container or (deep and is_open(child)):
            yield from open_modules(child, settled, context, deep=deep)


def open_scopes(
    scope: LinenNode, settled: Settled, context: Context, *, deep: bool
) -> Iterator[LinenNode]:
    """The Linen scopes below a scope that still need a counterpart; as `open_modules`."""
    for child in scope.children.values():
        if child.children and settled.is_free(child, context):
            if _is_untouched(child, settled, context):
                yield child
            if deep:
                yield from open_scopes(child, settled, context, deep=deep)


def _is_untouched(node: NNXNode | LinenNode, settled: Settled, context: Context) -> bool:
    return all(settled.is_free(each, context) for each in node.walk())


def is_open(node: NNXNode) -> bool:
    """Whether the parts of an NNX module may be looked for one by one."""
    if node.is_leaf:
        return False
    return node.layer is None or node.layer.has_parts


def nnx_core(node: NNXNode) -> NNXNode:
    """The module that a chain of modules with one child each holds."""
    while is_open(node) and len(node.children) == 1:
        (child,) = node.children.values()
        if child.is_leaf or child.is_shared:
            break
        node = child
    return node


def linen_core(node: LinenNode) -> LinenNode:
    """The scope that a chain of scopes with one child each holds."""
    while len(node.children) == 1:
        (child,) = node.children.values()
        if child.leaves or not child.children:
            break
        node = child
    return node


def nnx_signature_of_pair(node: NNXNode, context: Context) -> Signature:
    """As `nnx_signature`; of a norm only what is not in the layer it normalises."""
    node = nnx_core(node)
    if node.is_norm:
        return Counter([frozenset((c, n, s) for _, c, n, s in _norm_leaves(node, context))])
    return nnx_signature(node, context)


def linen_signature_of_pair(node: LinenNode, context: Context) -> Signature:
    """As `linen_signature`; of a norm only what is not in the layer it normalises."""
    node = linen_core(node)
    if any("/" in name for name in node.children):
        return Counter([_own_leaves(node, context)])
    return linen_signature(node, context)


def _own_leaves(scope: LinenNode, context: Context) -> frozenset[tuple[str, str, Any]]:
    return frozenset(
        (collection, _without_layer(name), without_axis(shape_of(leaf.value), context.linen))
        for collection, name, leaf in scope.own_leaves
        if collection != "cache"
    )


def _without_layer(name: str) -> str:
    """A norm's `Dense_0/kernel/u` as `/kernel/u`: the layer's name differs between the sides."""
    _, slash, rest = name.partition("/")
    return slash + rest if slash else name


def _linen_form(
    node: NNXNode, context: Context, taken: frozenset[NNXNode] = frozenset()
) -> Iterator[tuple[Path, str, str, Any]]:
    """(group, collection, name, shape) of the leaves below, in Linen's layout."""
    layer = node.layer
    if node.is_norm:
        yield from _norm_leaves(node, context)
        yield from _linen_form(node.children["layer_instance"], context)
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
    for key, child in node.children.items():
        if not child.is_leaf:
            yield from _linen_form(child, context, taken)
        elif node.is_linen:
            if child.collection not in (None, "cache"):
                scope, name = (
                    (node.path[:-1], node.path[-1])
                    if isinstance(key, InCollection)
                    else (node.path, key)
                )
                yield scope, child.collection, str(name), _shape(child, context)
        # Adapters have no place in the model they adapt; arrays and tables are not weights.
        elif (
            child.is_variable
            and not (child in taken or is_adapter(child) or is_computed(key, node))
            and child.collection != "cache"
        ):
            name = layer.linen_of_name.get(str(key)) if layer is not None else None
            yield node.path, _collection(child), name or str(key), _shape(child, context)


def _collection(leaf: NNXNode) -> str:
    return "params" if leaf.is_param else leaf.collection or ""


def _norm_leaves(node: NNXNode, context: Context) -> Iterator[tuple[Path, str, str, Any]]:
    for path, name, leaf in node.leaves_by_path():
        # In some versions of Flax a scale is a bare array in NNX.
        collection = (leaf.is_variable and leaf.collection) or "params"
        text = "/".join(["", *map(str, path), name])
        yield (*node.path, "norm"), collection, text, _shape(leaf, context)


def nnx_shapes(node: NNXNode, context: Context) -> Counter[tuple[str, Any]]:
    """How many leaves of each collection and shape an NNX module or leaf has in Linen's layout."""
    if node.is_leaf:
        return Counter([(_collection(node), _shape(node, context))])
    return Counter((collection, shape) for _, collection, _, shape in _linen_form(node, context))


def linen_shapes(node: LinenNode, context: Context) -> Counter[tuple[str, Any]]:
    """As `nnx_shapes`, of a Linen scope or leaf."""
    return Counter(
        (collection, without_axis(shape_of(leaf.value), context.linen))
        for each in node.walk()
        for collection, leaf in each.leaves.items()
        if collection != "cache"
    )


def told_by_number(scope: LinenNode, context: Context) -> frozenset[str]:
    """The names below a scope that differ from another of the same shapes by their number alone."""
    alike: dict[Any, list[str]] = {}
    for name, child in scope.children.items():
        around, digits = numbered(name)
        if digits:
            shapes = linen_shapes(child, context)
            alike.setdefault((around, frozenset(shapes.items())), []).append(name)
    return frozenset(name for names in alike.values() if len(names) > 1 for name in names)


def own_classes(nnx: NNXNode) -> frozenset[str]:
    """The names of the classes in an NNX model that are not Flax's own."""
    classes = {type(node.item) for node in nnx.walk() if node.cls is not None}
    return frozenset(cls.__name__ for cls in classes if layer_of_nnx(cls) is None)


def is_adapter(node: NNXNode) -> bool:
    """Whether a leaf belongs to a LoRA adapter."""
    return node.is_variable and issubclass(node.item.var_type, nnx.LoRAParam)


def is_computed(key: Any, holder: NNXNode | None) -> bool:
    """Whether a module's leaf is one that its constructor computes from its arguments."""
    layer = holder.layer if holder is not None else None
    return layer is not None and key in layer.computed


def _shape(leaf: NNXNode, context: Context) -> Any:
    return without_axis(shape_of(leaf.value), context.nnx)


def automatic_class(scope: LinenNode) -> str | None:
    """The class that the name of a scope tells if it is an automatic one, such as `Dense_0`."""
    match = _AUTOMATIC.fullmatch(str(scope.path[-1])) if scope.path else None
    return match.group(1) if match else None


def types_agree(node: NNXNode, scope: LinenNode, classes: frozenset[str]) -> bool:
    """Whether the class that an automatic name tells is one that the NNX module can be."""
    name = automatic_class(scope)
    if node.is_linen and node.path and node.item is None:
        own = _AUTOMATIC.fullmatch(str(node.path[-1]))
        named = {each for each in (own and own.group(1), name) if each}
        return len(named) < 2 or not all(map(is_linen_layer, named))
    if name is None or node.cls is None or not (is_linen_layer(name) or name in classes):
        return True
    return name in _type_names(node)


def _type_names(node: NNXNode) -> set[str]:
    if isinstance(node.item, ToNNX):
        return {base.__name__ for base in type(node.item.to_nnx__module).__mro__}
    own = {base.__name__ for base in node.cls.__mro__} if node.cls else set()
    return own | (node.layer.linen_names if node.layer else set())
