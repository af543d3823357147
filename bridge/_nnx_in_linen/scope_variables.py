"""Reads and writes the variables of a Linen module that stands for an NNX module."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.core import meta

from bridge._conversion.collections import GRAPHDEF, STATIC
from bridge._conversion.neutral import Address, Path, nest
from bridge._conversion.own_leaves import without_static
from bridge._errors import ReservedNameError, path_text
from bridge._flax.linen_modules import place_in_shared_scope, remove_variable
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import StaticGraphDef


def graphdef_name(module: nn.Module) -> str:
    """The name of the module's GraphDef: another one for each that shares a scope."""
    place = place_in_shared_scope(module)
    return f"{GRAPHDEF}_{place}" if place else GRAPHDEF


def stored_graphdef(module: nn.Module) -> StaticGraphDef | None:
    """The GraphDef in the module's variables, None if a checkpoint has a stand-in."""
    stored = module.get_variable(STATIC, graphdef_name(module))
    return static_graphdef.intern(stored) if isinstance(stored, nnx.GraphDef) else None


def store_graphdef(module: nn.Module, graphdef: StaticGraphDef | None) -> None:
    """Keeps the GraphDef, unless a lifted transform has left the collection behind.

    None keeps a place for it: the collection is to be the first one, and what goes into it is known
    last.
    """
    if module.is_mutable_collection(STATIC):
        module.put_variable(STATIC, graphdef_name(module), graphdef)


def remove(module: nn.Module, addresses: Iterable[Address]) -> None:
    """Removes leaves from mutable collections, and the mappings that held nothing else."""
    for collection, path in addresses:
        keys = (str(path[0]), *path[1:])
        remove_variable(module, collection, keys)


def read(module: nn.Module) -> dict[str, Any]:
    """The module's variables by collection, without GraphDefs and what is empty."""
    variables = {collection: tree for collection, tree in module.variables.items() if tree}
    if STATIC in variables:
        static = without_static(variables.pop(STATIC))
        variables.update({STATIC: static} if static else {})
    return variables


def write(
    module: nn.Module,
    leaves: Mapping[Address, Any],
    found: Mapping[Address, Any],
    keys: Mapping[Address, Address],
    *,
    string_keys: bool,
) -> None:
    """Writes leaves into the mutable collections, and leaves the others alone.

    Args:
      module: the bound Linen module.
      leaves: the new leaves.
      found: the leaves that are there; a box among them stays and gets the new value.
      keys: where a leaf really is, if not at its address.
      string_keys: whether integer keys are written as strings.
    """
    # Linen tries the filter of each outer scope in turn.
    is_mutable = functools.cache(module.is_mutable_collection)
    by_collection: dict[str, dict[Path, Any]] = {}
    for address, leaf in leaves.items():
        collection, path = keys.get(address, address)
        if is_mutable(collection):
            own = spelled(path, string_keys)
            if collection == STATIC and own[0] == graphdef_name(module):
                raise ReservedNameError(
                    f"{path_text(*address)} of a ToLinen holds its GraphDef; rename the attribute,"
                    " or register its Variable type for another collection"
                )
            by_collection.setdefault(collection, {})[own] = _boxed_as(found.get(address), leaf)
    for collection, flat in by_collection.items():
        for name, tree in nest(flat).items():
            module.put_variable(collection, name, tree)


def spelled(path: Path, string_keys: bool) -> Path:
    """A path as Linen variables have it: only strings at the top, or everywhere if asked for."""
    return tuple(map(str, path)) if string_keys else (str(path[0]), *path[1:])


def _boxed_as(old: Any, leaf: Any) -> Any:
    if isinstance(old, dict) and old and isinstance(leaf, meta.AxisMetadata):
        # It came without its box, as `nn.unbox` leaves it; an empty one would be nothing.
        return leaf.unbox() or leaf
    if not isinstance(old, meta.AxisMetadata):
        return leaf
    return old.replace_boxed(leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf)
