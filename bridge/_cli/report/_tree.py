"""The modules of a mixed model: what each is, and the parameters it owns.

`modules_of` is pure: it reads classes and shapes, computes nothing, and takes concrete, abstract
and traced models alike.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Container, Iterable, Mapping
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
from bridge._nnx_in_linen.bound_module import BoundModule
from bridge._nnx_in_linen.creation import rebuild
from bridge._nnx_in_linen.matched_variables import MatchedVariables
from bridge._nnx_in_linen.to_linen import ToLinen

from ._observed import LINEN_WRAPPERS, NNX_WRAPPERS, LinenRecord, Observed, recipe_of


class Kind(enum.StrEnum):
    """What a module is."""

    LINEN = "linen"
    NNX = "nnx"
    WRAPPED_LINEN = "wrapped-linen"
    """A Linen module in a `ToNNX`; the two are one module of the report."""
    WRAPPED_NNX = "wrapped-nnx"
    """An NNX module in a `ToLinen`; the two are one module of the report."""

    @property
    def is_native(self) -> bool:
        """Whether the module is written in NNX."""
        return self in (Kind.NNX, Kind.WRAPPED_NNX)


@dataclasses.dataclass(frozen=True)
class Size:
    """How many parameters, and how many bytes they take."""

    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclasses.dataclass
class ModuleEntry:
    """One module of a model.

    Attributes:
        path: where it is, as in `nnx.state` and in Linen variables: wrappers add no key.
        cls: its class, the one inside if it is wrapped; None if nothing was seen that tells it.
        kind: what it is.
        own: its parameters without those of its submodules. A shared parameter counts once.
        total: its parameters, those of its submodules included.
        native: the part of `total` that NNX modules own.
        is_empty: whether it is a `ToNNX` that has no variables and was not seen running.
    """

    path: tuple[str, ...]
    cls: type | None
    kind: Kind
    own: Size = Size()
    total: Size = Size()
    native: Size = Size()
    is_empty: bool = False

    @property
    def share(self) -> float:
        """How much of `total` is `native`; 1 without any parameters, as none is left to migrate."""
        total = self.total.parameters
        return self.native.parameters / total if total else 1.0


def modules_of(
    model: nnx.Module | nn.Module, observed: Observed, variables: Mapping[str, Any] | None = None
) -> list[ModuleEntry]:
    """The model's own module first, and each other one behind the one that it is in.

    A Linen `model` is unbound. The modules that were seen running (`observed`) tell their classes.
    `variables` are those of a Linen model, as its `init` returns them.
    """
    found = _Modules(observed)
    if isinstance(model, nnx.Module):
        found.add_nnx(model, (), Kind.NNX)
    else:
        found.add_linen(model, variables or {}, observed.of(None), (), Kind.LINEN)
    return found.in_order()


def above(path: Path, among: Container[Path]) -> list[Path]:
    """Those of some paths that lie above a path, the shortest first."""
    return [path[:n] for n in range(len(path)) if path[:n] in among]


class _Modules:
    """The modules by path, and the parameters."""

    def __init__(self, observed: Observed):
        self._observed = observed
        self._modules: dict[Path, ModuleEntry] = {}
        self._parameters: list[tuple[Path, Any]] = []

    def add_nnx(self, module: nnx.Module, at: Path, kind: Kind) -> None:
        """Adds an NNX module, native or wrapped, that is at path `at`, and all below it."""
        # One walk for the whole tree, so that shared objects are visited once.
        items = dict(nnx.iter_graph(module, graph=True))
        wrappers = {path for path, item in items.items() if isinstance(item, LINEN_WRAPPERS)}
        for path in sorted(items, key=lambda path: [(isinstance(key, str), key) for key in path]):
            item, here = items[path], (*at, *map(str, path))
            if above(path, wrappers):
                continue
            if path in wrappers:
                self._add_wrapper(item, here)
            elif isinstance(item, nnx.Variable):
                if issubclass(item.var_type, nnx.Param):
                    self._parameters.append((here, item.get_raw_value()))
            elif not path or _is_module(item):
                # The model itself may be a container.
                self._modules[here] = ModuleEntry(here, type(item), Kind.NNX if path else kind)

    def _add_wrapper(self, wrapper: Any, at: Path) -> None:
        module = wrapper.to_nnx__module
        record = self._observed.of(module)
        held = {address: entry.leaf for address, entry in held_variables(wrapper).items()}
        graphdefs = wrapper.to_nnx__graphdefs if isinstance(wrapper, ToNNX) else ()
        variables = linen_leaves.to_variables(held)
        self.add_linen(module, variables, record, at, Kind.WRAPPED_LINEN, graphdefs)
        own = self._modules[at]
        own.is_empty = record is None and not held and own.kind is Kind.WRAPPED_LINEN

    def add_linen(
        self,
        module: nn.Module,
        variables: Mapping[str, Any],
        record: LinenRecord | None,
        at: Path,
        kind: Kind,
        graphdefs: Iterable[tuple[Path, nnx.GraphDef[Any]]] = (),
    ) -> None:
        """Adds a Linen module that is at path `at`, and all below it.

        `record` is what was seen of it, and `graphdefs` are those of each `ToLinen` that are not
        among the variables.
        """
        found = [*graphdefs, *walk(variables.get("nnx", {}))]
        by_path = {p[:-1]: as_static(g) for p, g in found if isinstance(g, nnx.GraphDef)}
        leaves = linen_leaves.from_variables(variables)
        classes: dict[Path, type | None] = {(): base_class(type(module))}
        if record is None:
            # Nothing ran, so only the variables' paths are known.
            classes.update((p[:n], None) for _, p in leaves for n in range(1, len(p)))
            classes.update((p, ToLinen) for p in by_path if p)
        else:
            classes.update((p, c) for p, c in record.classes.items() if p)
        wrappers = {
            path for path, cls in classes.items() if path in by_path or _is_nnx_wrapper(cls)
        }
        for path, cls in classes.items():
            here = (*at, *path)
            if path in wrappers:
                graphdef = by_path.get(path) or _rebuilt(path, module, record)
                self.add_nnx(_merged(path, graphdef, leaves), here, Kind.WRAPPED_NNX)
            elif not above(path, wrappers):
                self._modules[here] = ModuleEntry(here, cls, Kind.LINEN if path else kind)
        active = registry.current()
        for (collection, path), leaf in leaves.items():
            is_parameter = issubclass(active.type_from_name(collection), nnx.Param)
            if is_parameter and not above(path, wrappers):
                self._parameters.append(((*at, *path), leaf.value))

    def in_order(self) -> list[ModuleEntry]:
        """The modules with their sizes."""
        for path, value in self._parameters:
            size = _size(value)
            around = [self._modules[each] for each in above(path, self._modules)]
            around[-1].own += size
            for module in around:
                module.total += size
                module.native += size if around[-1].kind.is_native else Size()
        first = {path: number for number, path in enumerate(self._modules)}

        def place(module: ModuleEntry) -> list[int]:
            return [first[each] for each in (*above(module.path, first), module.path)]

        return sorted(self._modules.values(), key=place)


def _is_module(item: Any) -> bool:
    return isinstance(item, nnx.Module) and not isinstance(item, nnx.List | nnx.Dict)


def _is_nnx_wrapper(cls: type | None) -> bool:
    return cls is not None and issubclass(cls, NNX_WRAPPERS)


def _merged(below: Path, graphdef: StaticGraphDef, leaves: Neutral) -> nnx.Module:
    """The NNX module of a `ToLinen`, with the shapes that its variables have."""
    own: dict[Address, Any] = {
        (collection, path[len(below) :]): leaf.value
        for (collection, path), leaf in leaves.items()
        if path[: len(below)] == below and not leaf.is_empty
    }
    found = MatchedVariables(graphdef, own)
    avals = {slot.address: aval for slot, aval in zip(found.slots, found.avals, strict=True)}
    return BoundModule(MatchedVariables(graphdef, {**avals, **found.leaves})).module


def _rebuilt(below: Path, module: nn.Module, record: LinenRecord | None) -> StaticGraphDef:
    """The GraphDef of a `ToLinen` that a lifted transform left behind, or that never ran."""
    recipe, call = (recipe_of(module), None) if record is None else record.calls[below]
    where = getattr(recipe.nnx_class, "__name__", repr(recipe.nnx_class))
    return rebuild(recipe, ("default",), call, where)


def _size(value: Any) -> Size:
    arrays = [x for x in jax.tree.leaves(value) if hasattr(x, "shape")]
    counts = [(math.prod(x.shape), x.dtype.itemsize) for x in arrays]
    return Size(sum(n for n, _ in counts), sum(n * width for n, width in counts))
