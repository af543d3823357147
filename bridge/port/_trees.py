"""Both sides as trees of modules, with the shapes of their leaves.

Only names, classes and shapes are looked at here, never a value.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

import jax
import numpy as np
from flax import nnx

import registry
from bridge._conversion import nnx_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.collections import OUTPUTS, STATIC
from bridge._conversion.linen_attributes import held_variables
from bridge._conversion.neutral import Address, Key, Leaf, Neutral, Path, walk
from bridge._errors import path_text
from bridge._flax.objects import CAPTURES
from bridge._flax.variables import raw_value
from bridge._layers.layer import LayerRow
from bridge._layers.table import layer_of_nnx
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._randomness.typed_keys import is_key
from bridge._rules.numbers import numbered

CACHE = "cache"
_AUTOMATIC = re.compile(r"([A-Za-z_]\w*)_\d+")
_NO_WEIGHTS = OUTPUTS | {STATIC}
_ARRAY = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class Row(NamedTuple):
    """A leaf as Linen has it.

    Attributes:
      leaf: the leaf of either side.
      shape: the leaf's own shape.
      layer: the path of the layer that has it.
      collection: its collection.
      name: its name in the layer.
      parts: how many Linen leaves the leaf holds side by side; this is one of them.
      is_vector: whether it only has the last axis.
    """

    leaf: AnyNode
    shape: Any
    layer: Path
    collection: str
    name: str
    parts: int = 1
    is_vector: bool = False


@dataclasses.dataclass(eq=False)
class _Node:
    """A place in one of the two trees."""

    path: Path
    children: dict[Any, Self] = dataclasses.field(default_factory=dict)
    # What `_structure.signature` found: many pairs ask for it again.
    signatures: dict[Any, Any] = dataclasses.field(default_factory=dict)

    # A scope tells nothing of its class.
    is_open = True
    is_container = is_shared = is_leaf = False

    @property
    def name(self) -> str:
        """The last name of the path."""
        return str(self.path[-1]) if self.path else ""

    @property
    def arrays(self) -> Mapping[Any, Any]:
        """The arrays at this very place, by what plans and traces know them by."""
        raise NotImplementedError

    @functools.cached_property
    def rows(self) -> Sequence[Row]:
        """The leaves here and below in Linen's layout, without caches."""
        raise NotImplementedError

    @property
    def below(self) -> dict[Any, Any]:
        """As `arrays`, here and below."""
        return {key: value for each in self.walk() for key, value in each.arrays.items()}

    def walk(self) -> Iterator[Self]:
        """This node and all below it, the outer ones first."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def at(self, path: Path) -> Self | None:
        """The node at a path below this one; a key may be the text of an integer."""
        node = self
        for key in path:
            by_text = {str(k): child for k, child in node.children.items()}
            node = by_text.get(str(key))
            if node is None:
                return None
        return node

    @property
    def core(self) -> Self:
        """The node that a chain of nodes with one child each holds."""
        node = self
        while node.is_open and len(node.children) == 1:
            (child,) = node.children.values()
            if child.is_leaf or child.is_shared:
                break
            node = child
        return node


@dataclasses.dataclass(eq=False)
class LinenNode(_Node):
    """A scope of Linen variables: what is at one path in all collections.

    Attributes:
      parent: the scope around it, None for the root.
      leaves: the leaf at this very path by collection.
    """

    parent: LinenNode | None = None
    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)

    @property
    def is_leaf(self) -> bool:
        return bool(self.leaves)

    @property
    def is_norm(self) -> bool:
        """Whether this is the scope of a layer that normalises another one."""
        return any("/" in name for name in self.children)

    @property
    def text(self) -> str:
        """The path as rules write it."""
        return "/".join(map(str, self.path))

    @property
    def arrays(self) -> Mapping[Address, Any]:
        return {(collection, self.path): leaf.value for collection, leaf in self.leaves.items()}

    @functools.cached_property
    def rows(self) -> Sequence[Row]:
        # A norm's `Dense_0/kernel/u`: the layer's name differs between the sides.
        name = self.name[max(self.name.find("/"), 0) :]
        own = [
            Row(self, shape_of(leaf.value), self.path[:-1], collection, name)
            for collection, leaf in self.leaves.items()
            if collection != CACHE
        ]
        return [*own, *(row for child in self.children.values() for row in child.rows)]

    @property
    def weights(self) -> dict[str, LinenNode]:
        """The weights directly below by name; a leaf is its own."""
        if self.is_leaf:
            return {"": self}
        return {name: each for name, each in self.children.items() if each.leaves.keys() - {CACHE}}

    @functools.cached_property
    def numbered_names(self) -> frozenset[str]:
        """The names directly below that differ from another one in their numbers alone."""
        pieces = {name: numbered(name).pieces for name in self.children}
        counts = Counter(pieces.values())
        return frozenset(name for name, own in pieces.items() if counts[own] > 1)

    @property
    def is_automatic(self) -> bool:
        """Whether Linen may have made the name, of a class and a number.

        A class begins with a capital by convention, so `block_0` is an item of a list `block`.
        """
        name = class_in(self.name)
        return name is not None and name.lstrip("_")[:1].isupper()

    @property
    def lineage(self) -> list[LinenNode]:
        """The scopes from the first one below the root to this one."""
        return [*self.parent.lineage, self] if self.parent else []


class InCollection(NamedTuple):
    """The key of a leaf inside a `ToNNX`, where several collections have its Linen path."""

    collection: str


@dataclasses.dataclass(eq=False)
class NNXNode(_Node):
    """A module, a container or a leaf of an NNX model, or a scope inside a `ToNNX`.

    The path is that of `nnx.state`. Below a `ToNNX`, the keys are those of the Linen path.

    Attributes:
      item: the object; a Variable or an array if this is a leaf, None in a State and for a scope.
      collection: a leaf's collection.
      is_linen: whether this is a `ToNNX`, or a scope or leaf inside one.
    """

    item: Any = None
    collection: str | None = None
    is_linen: bool = False

    @property
    def is_leaf(self) -> bool:
        return self.collection is not None

    @property
    def address(self) -> Address:
        """A leaf's collection and path."""
        return self.collection or "", self.path

    @property
    def is_container(self) -> bool:
        """Whether this is a list, tuple or dict, which Linen joins into the names of its items."""
        if isinstance(self.item, nnx.List | nnx.Dict | list | tuple | dict):
            return True
        # A State has no classes.
        return self.item is None and all(isinstance(key, int) for key in self.children)

    @property
    def list_items(self) -> list[NNXNode]:
        """The items of a list in their order; empty for anything else."""
        is_list = self.is_container and all(isinstance(key, int) for key in self.children)
        return [self.children[key] for key in sorted(self.children)] if is_list else []

    @property
    def is_shared(self) -> bool:
        """Whether this is a Linen path with several leaves, or with a leaf and a scope."""
        return any(isinstance(key, InCollection) for key in self.children)

    @property
    def cls(self) -> type[Any] | None:
        return None if self.item is None or self.is_leaf else type(self.item)

    @property
    def layer(self) -> LayerRow | None:
        """What is known of the module's class."""
        is_module = self.item is not None and self.collection is None
        return layer_of_nnx(type(self.item)) if is_module else None

    @property
    def is_norm(self) -> bool:
        """Whether this is a layer that normalises another one, such as `SpectralNorm`."""
        return self.layer is not None and self.layer.kept_by_path is not None

    def leaves_by_path(self) -> Iterator[tuple[Path, str, NNXNode]]:
        """(path of the normalised parameter, name, leaf) of what a norm keeps for its layer."""
        kept = self.layer and self.layer.kept_by_path
        held = kept and self.children.get(kept.attribute)
        if not kept or not held:
            return
        for key, leaf in held.children.items():
            path = cast(Path, key)
            yield (path[:-1], path[-1], leaf) if kept.leaf is None else (path, kept.leaf, leaf)

    @property
    def value(self) -> Any:
        """A leaf's value as it is stored."""
        return raw_value(self.item) if isinstance(self.item, nnx.Variable) else self.item

    @property
    def is_variable(self) -> bool:
        return isinstance(self.item, nnx.Variable)

    @property
    def is_param(self) -> bool:
        return self.is_variable and issubclass(self.item.var_type, nnx.Param)

    @property
    def is_adapter(self) -> bool:
        """Whether this is a leaf of a LoRA adapter."""
        return self.is_variable and issubclass(self.item.var_type, nnx.LoRAParam)

    @property
    def is_open(self) -> bool:
        """Whether the parts of a module may be looked for one by one."""
        if self.is_leaf:
            return False
        return self.layer is None or self.layer.has_parts

    @property
    def text(self) -> str:
        """The path as rules write it."""
        return nnx_text(self.path)

    @property
    def arrays(self) -> Mapping[Path, Any]:
        return {self.path: self.value} if self.is_leaf else {}

    @property
    def weights(self) -> dict[str, NNXNode]:
        """The weights directly below by name; a leaf is its own.

        Adapters have no place in the model they adapt; arrays and tables are no weights.
        """
        if self.is_leaf:
            return {"": self}
        return {
            str(key): child
            for key, child in self.children.items()
            if child.is_variable and not (child.is_adapter or self.computes(key))
            if child.collection != CACHE
        }

    @functools.cached_property
    def rows(self) -> Sequence[Row]:
        if self.is_leaf:
            return [self._row(self, self.path[:-1], self.name)]
        layer, found = self.layer, list[Row]()
        if self.is_norm:
            for path, name, leaf in self.leaves_by_path():
                row = self._row(leaf, self.path, "/".join(["", *map(str, path), name]))
                # In some versions of Flax a scale is a bare array in NNX.
                found.append(row if leaf.is_variable else row._replace(collection="params"))
            return [*found, *self.children["layer_instance"].rows]
        for path, parts in layer.linen_of_path.items() if layer is not None else ():
            if (leaf := self.at(path)) is not None:
                found += [
                    self._row(leaf, (*self.path, *part[:-1]), part[-1], len(parts))
                    for part in parts
                ]
        taken = {row.leaf for row in found}
        for path in layer.zero if layer is not None and found else ():
            *group, name = path.split("/")
            row = found[-1]._replace(layer=(*self.path, *group), collection="params", name=name)
            found.append(row._replace(is_vector=True))
        own = {*self.weights.values()}
        for key, child in self.children.items():
            if not child.is_leaf:
                found += [row for row in child.rows if row.leaf not in taken]
            elif self.is_linen and child.collection != CACHE:
                shared = isinstance(key, InCollection)
                row = self._row(child, child.path[:-1], str(key))
                found.append(row._replace(layer=self.path[:-1], name=self.name) if shared else row)
            elif not self.is_linen and child in own and child not in taken:
                name = layer.linen_of_name.get(str(key)) if layer is not None else None
                found.append(self._row(child, self.path, name or str(key)))
        return found

    def _row(self, leaf: NNXNode, layer: Path, name: str, parts: int = 1) -> Row:
        is_param = leaf.is_param and not leaf.is_linen
        collection = "params" if is_param else leaf.collection or ""
        return Row(leaf, shape_of(leaf.value), layer, collection, name, parts)

    def computes(self, key: Key) -> bool:
        """Whether a leaf is one that the module's constructor computes from its arguments."""
        return self.layer is not None and key in self.layer.computed


# A function of either side is written once.
AnyNode: TypeAlias = LinenNode | NNXNode
N = TypeVar("N", LinenNode, NNXNode)


def linen_nodes(neutral: Neutral) -> tuple[LinenNode, list[Address]]:
    """The tree of Linen variables, and the addresses of what is not a weight and left out of it."""
    root, left_out = LinenNode(()), []
    for (collection, path), leaf in neutral.items():
        if leaf.is_empty:
            continue
        if _is_no_weight(collection):
            left_out.append((collection, path))
            continue
        node = root
        for key in path:
            if str(key) not in node.children:
                node.children[str(key)] = LinenNode((*node.path, key), parent=node)
            node = node.children[str(key)]
        node.leaves[collection] = leaf
    return root, left_out


def nnx_nodes(model: Any) -> tuple[NNXNode, list[Address]]:
    """The tree of an NNX module or a State, and the addresses of what is not a weight in it."""
    active = registry.current()
    if isinstance(model, nnx.Pytree):
        items = [each for each in nnx.iter_graph(model, graph=True) if CAPTURES not in each[0]]
    else:
        items = list(walk(cast(Mapping[Any, Any], model)))
    # From the outside in, so that a wrapper is met before what is in it.
    items.sort(key=lambda entry: len(entry[0]))
    wrappers: dict[Path, None] = {}
    collections: dict[Path, str] = {}
    left_out: list[Address] = []
    for path, item in items:
        if wrappers and any(path[:n] in wrappers for n in range(len(path))):
            continue
        is_variable = isinstance(item, nnx.Variable)
        if isinstance(item, ToNNX):
            wrappers[path] = None
        elif is_variable or isinstance(item, _ARRAY):
            collection = active.name_from_type(item.var_type) if is_variable else nnx_leaves.ARRAYS
            if _is_no_weight(collection) or (not is_variable and is_key(item)):
                left_out.append((collection, path))
            else:
                collections[path] = collection
    # Modules without weights are left out too.
    kept = {path[:n] for path in (*collections, *wrappers) for n in range(len(path) + 1)}
    root = NNXNode(())
    for path, item in items:
        if path in collections:
            node = _node(root, path)
            node.item, node.collection = item, collections[path]
        elif (path in kept or not path) and isinstance(item, nnx.Pytree | list | tuple | dict):
            _node(root, path).item = item
    for path in wrappers:
        left_out += _wrapped(_node(root, path))
    return root, left_out


def outermost(nodes: Iterable[N]) -> list[N]:
    """The nodes that do not lie inside another one of them."""
    by_path = {node.path: node for node in nodes}
    return [
        node
        for path, node in by_path.items()
        if not any(path[:length] in by_path for length in range(len(path)))
    ]


def value_of(item: Any) -> Any:
    """The value of a Variable as it is stored, or a bare array."""
    return raw_value(item) if isinstance(item, nnx.Variable) else item


def class_in(name: str) -> str | None:
    """The class that a name tells if it is an automatic one, such as `Dense_0`."""
    match = _AUTOMATIC.fullmatch(name)
    return match.group(1) if match else None


def linen_text(address: Address) -> str:
    """A Linen address as the report writes it."""
    return path_text(*address)


def nnx_text(path: Path) -> str:
    """An NNX path as the report writes it."""
    return ".".join("/".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in path)


def _wrapped(wrapper: NNXNode) -> list[Address]:
    """Adds what a `ToNNX` holds at its Linen paths; returns what is not a weight."""
    wrapper.is_linen = True
    leaves: dict[Path, list[NNXNode]] = {}
    left_out: list[Address] = []
    for (collection, linen_path), held in held_variables(wrapper.item).items():
        # In a State a leaf may lie elsewhere than in Linen, which has collections.
        path = (*wrapper.path, *held.path)
        if held.leaf.is_empty:
            continue
        if _is_no_weight(collection):
            left_out.append((collection, path))
        else:
            leaf = NNXNode(path, item=held.variable, collection=collection, is_linen=True)
            leaves.setdefault(linen_path, []).append(leaf)
    scopes = {path[:n] for path in leaves for n in range(len(path))}
    for path, together in leaves.items():
        if len(together) == 1 and path not in scopes:
            _node(wrapper, path[:-1]).children[path[-1]] = together[0]
        else:
            shared = _node(wrapper, path)
            shared.children |= {InCollection(leaf.collection or ""): leaf for leaf in together}
    return left_out


def _node(root: NNXNode, path: Path) -> NNXNode:
    node = root
    for key in path:
        below = NNXNode((*node.path, key), is_linen=node.is_linen)
        node = node.children.setdefault(key, below)
    return node


def _is_no_weight(collection: str) -> bool:
    if collection in _NO_WEIGHTS:
        return True
    typ = registry.current().type_from_name(collection)
    return issubclass(typ, nnx.RngState | nnx.Intermediate | nnx.Perturbation)
