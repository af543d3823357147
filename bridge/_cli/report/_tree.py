"""The tree of a mixed model: every module, what it is, and the parameters it owns.

`module_tree` is pure: it reads classes and shapes, computes nothing, and takes concrete, abstract
and traced models alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

import registry
from bridge._conversion import linen_leaves
from bridge._conversion.linen_attributes import held_variables
from bridge._conversion.neutral import Address, Neutral, Path, walk
from bridge._flax.linen_modules import base_class
from bridge._graphdefs.static_graphdef import StaticGraphDef, as_static
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._nnx_in_linen import definitions
from bridge._nnx_in_linen.bound_module import BoundModule
from bridge._nnx_in_linen.matched_variables import MatchedVariables
from bridge._nnx_in_linen.to_linen import ToLinen

from ._nodes import Kind, Node, Size
from ._observed import (
    LINEN_WRAPPERS,
    NNX_WRAPPERS,
    LinenRecord,
    Observed,
    recipe_of,
)


def module_tree(
    model: nnx.Module | nn.Module, observed: Observed, variables: Mapping[str, Any] | None = None
) -> Node:
    """The model's own node, with the tree below it.

    A Linen `model` is unbound. The modules that were seen running (`observed`) tell their classes.
    `variables` are those of a Linen model, as its `init` returns them.
    """
    if isinstance(model, nnx.Module):
        return _nnx_node(model, (), observed, Kind.NNX)
    part = _LinenPart.of(model, variables or {}, observed.of(None), ())
    return part.node((), observed, Kind.LINEN)


def _nnx_node(module: nnx.Module, at: Path, observed: Observed, kind: Kind) -> Node:
    """The node of an NNX module, native or wrapped, that is at path `at` of the model."""
    return _NNXPart.of(module).node(at, observed, kind)


@dataclasses.dataclass(frozen=True)
class _NNXPart:
    """An NNX module and all below it, down to the next wrapper.

    Attributes:
      modules: the modules by path below it.
      own: the values of each module's own parameters.
      below: the paths of each module's submodules.
    """

    modules: dict[Path, nnx.Module]
    own: dict[Path | None, list[Any]]
    below: dict[Path | None, list[Path]]

    @classmethod
    def of(cls, module: nnx.Module) -> _NNXPart:
        # One walk for the whole tree, so that shared objects are visited once.
        items = dict(nnx.iter_graph(module, graph=True))
        # The model itself may be a container.
        every = {path: item for path, item in items.items() if not path or _is_module(item)}
        wrappers = {path for path, item in every.items() if isinstance(item, LINEN_WRAPPERS)}
        modules = {path: item for path, item in every.items() if not _owner(path, wrappers)}
        own: dict[Path | None, list[Any]] = {}
        for path, item in items.items():
            if isinstance(item, nnx.Variable) and issubclass(item.var_type, nnx.Param):
                own.setdefault(_owner(path, modules), []).append(item.get_raw_value())
        below: dict[Path | None, list[Path]] = {}
        for path in modules:
            below.setdefault(_owner(path, modules), []).append(path)
        return cls(modules, own, below)

    def node(self, at: Path, observed: Observed, kind: Kind, below: Path = ()) -> Node:
        """The node of the module at path `below`; `at` is where the whole part is in the model."""
        path = (*at, *below)
        found = self.modules[below]
        if isinstance(found, LINEN_WRAPPERS):
            return _wrapped_node(found, path, observed)
        children = sorted(self.below.get(below, ()), key=_declared(found, len(below)))
        return Node(
            _text(path),
            type(found),
            kind,
            _size(self.own.get(below, ())),
            tuple(self.node(at, observed, Kind.NNX, child) for child in children),
        )


def _is_module(item: Any) -> bool:
    return isinstance(item, nnx.Module) and not isinstance(item, nnx.List | nnx.Dict)


def _owner(path: Path, owners: Container[Path]) -> Path | None:
    """The longest of the paths that lie above a path."""
    above = (path[:length] for length in range(len(path) - 1, -1, -1))
    return next((p for p in above if p in owners), None)


def _declared(module: nnx.Module, depth: int) -> Callable[[Path], Any]:
    """The order in which a module's constructor made what is below it; paths are the model's."""
    order = {name: index for index, name in enumerate(vars(module))}

    def key(path: Path) -> Any:
        rest = [(isinstance(k, str), k) for k in path[depth + 1 :]]
        return order.get(str(path[depth]), len(order)), rest

    return key


def _wrapped_node(wrapper: Any, path: Path, observed: Observed) -> Node:
    module = wrapper.to_nnx__module
    record = observed.of(module)
    held = {address: entry.leaf for address, entry in held_variables(wrapper).items()}
    variables = linen_leaves.to_variables(held)
    graphdefs = wrapper.to_nnx__graphdefs if isinstance(wrapper, ToNNX) else ()
    node = _LinenPart.of(module, variables, record, graphdefs).node(
        path, observed, Kind.WRAPPED_LINEN
    )
    is_empty = record is None and not variables and node.kind is Kind.WRAPPED_LINEN
    return dataclasses.replace(node, is_empty=is_empty)


@dataclasses.dataclass(frozen=True)
class _LinenPart:
    """A Linen module and all below it, down to the next wrapper.

    Attributes:
        module: the Linen module.
        classes: the classes by path below it, None where a class is not known.
        leaves: its variables.
        graphdefs: the GraphDef of each `ToLinen` by path.
        record: what was seen of it.
        own: the values of each module's own parameters.
        below: the paths of each module's submodules.
    """

    module: nn.Module
    classes: dict[Path, type | None]
    leaves: Neutral
    graphdefs: dict[Path, StaticGraphDef]
    record: LinenRecord | None
    own: dict[Path | None, list[Any]]
    below: dict[Path | None, list[Path]]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        variables: Mapping[str, Any],
        record: LinenRecord | None,
        graphdefs: Iterable[tuple[Path, nnx.GraphDef[Any]]],
    ) -> _LinenPart:
        found = [*graphdefs, *walk(variables.get("nnx", {}))]
        by_path = {p[:-1]: as_static(g) for p, g in found if isinstance(g, nnx.GraphDef)}
        leaves = linen_leaves.from_variables(variables)
        classes: dict[Path, type | None] = {(): base_class(type(module))}
        if record is None:
            # Nothing ran, so only the variables' paths are known.
            above = (p[:n] for _, p in leaves for n in range(1, len(p)))
            classes.update((p, None) for p in above if not _below_any(p, by_path))
            classes.update((p, ToLinen) for p in by_path if p)
        else:
            classes.update((p, c) for p, c in record.classes.items() if p)
        active = registry.current()
        # Once for all modules: doing it for each one would take quadratic time.
        own: dict[Path | None, list[Any]] = {}
        for (collection, path), leaf in leaves.items():
            if issubclass(active.type_from_name(collection), nnx.Param):
                own.setdefault(_owner(path, classes), []).append(leaf.value)
        below: dict[Path | None, list[Path]] = {}
        for path in filter(None, classes):
            below.setdefault(_owner(path, classes), []).append(path)
        return cls(module, classes, leaves, by_path, record, own, below)

    def node(self, at: Path, observed: Observed, kind: Kind, below: Path = ()) -> Node:
        """The node of the module at path `below`; `at` is where the whole part is in the model."""
        path = (*at, *below)
        found = self.classes[below]
        if below in self.graphdefs or (isinstance(found, type) and issubclass(found, NNX_WRAPPERS)):
            return _nnx_node(self._merged(below), path, observed, Kind.WRAPPED_NNX)
        return Node(
            _text(path),
            found,
            kind,
            _size(self.own.get(below, ())),
            tuple(
                self.node(at, observed, Kind.LINEN, child) for child in self.below.get(below, ())
            ),
        )

    def _merged(self, below: Path) -> nnx.Module:
        """The NNX module of a `ToLinen`, with the shapes that its variables have."""
        leaves: dict[Address, Any] = {
            (collection, p[len(below) :]): leaf.value
            for (collection, p), leaf in self.leaves.items()
            if p[: len(below)] == below and not leaf.is_empty
        }
        graphdef = self.graphdefs.get(below)
        if graphdef is None:
            # A lifted transform has left collection `nnx` behind, or nothing ran.
            graphdef = self._rebuilt(below)
        found = MatchedVariables(graphdef, leaves)
        avals = {slot.address: aval for slot, aval in zip(found.slots, found.avals, strict=True)}
        full = MatchedVariables(graphdef, {**avals, **found.leaves})
        return BoundModule(full).module

    def _rebuilt(self, below: Path) -> StaticGraphDef:
        if self.record is not None:
            recipe, call = self.record.calls[below]
        else:
            recipe, call = recipe_of(self.module), None
        where = getattr(recipe.nnx_class, "__name__", repr(recipe.nnx_class))
        return definitions.rebuild(recipe, ("default",), call, where)


def _below_any(path: Path, others: Iterable[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _size(values: Iterable[Any]) -> Size:
    arrays = [x for value in values for x in jax.tree.leaves(value) if hasattr(x, "shape")]
    counts = [(math.prod(x.shape), x.dtype.itemsize) for x in arrays]
    return Size(sum(n for n, _ in counts), sum(n * width for n, width in counts))


def _text(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))
