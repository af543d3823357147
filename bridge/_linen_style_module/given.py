"""Gives a module Linen variables, those of submodules that it does not have yet as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from bridge._conversion import linen_attributes, linen_leaves, nnx_leaves
from bridge._conversion.inner_boxes import unboxed_within
from bridge._conversion.linen_attributes import LinenHolder, is_linen_style
from bridge._conversion.matching import compare
from bridge._conversion.neutral import Address, Displaced, nest, walk
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._errors import NameInUseError
from bridge._flax.variables import assign_raw_value, raw_value

from .attributes import put_part
from .variables import PendingVariables, add, is_vacant, linen_collection


def _pending(tree: Mapping[Any, Any]) -> PendingVariables:
    found = PendingVariables()
    for name, value in tree.items():
        part = _pending(value) if isinstance(value, Mapping) else unboxed_within(value)
        setattr(found, str(name), part)
    return found


def install(module: nnx.Pytree, variables: Mapping[str, Any]) -> None:
    """Gives a module Linen variables, those of submodules that it does not have yet as well."""
    linen_leaves.check_variables(variables)
    leaves = linen_attributes.as_arrays(linen_leaves.from_variables(variables))
    # An empty dict is a variable's value, unless something else is below its path.
    above = {path[:i] for _, path in leaves for i in range(len(path))} | {()}
    kept = {(c, path): x for (c, path), x in leaves.items() if not x.is_empty or path not in above}
    tree = nest(nnx_leaves.to_leaves(kept, all_variables=True))
    claim(module, _pending(tree), where=f"{type(module).__name__}")


def claim(module: nnx.Pytree, pending: PendingVariables, where: str) -> None:
    """Gives the Variables at a module's place to the module, which may be any NNX module.

    Raises MismatchError if the module has no place for one, lacks one, or has one of another shape.
    """
    if isinstance(module, LinenHolder):
        for name, value in pending.dicts().items():
            setattr(module, name, nnx.data(value))
    elif is_linen_style(type(module)):
        for name, value in pending.items():
            own = vars(module).get(name)
            if isinstance(own, nnx.Pytree) and is_vacant(value):
                continue
            if isinstance(value, nnx.Variable):
                add(module, linen_collection(value), name, value)
            elif isinstance(own, nnx.Pytree):
                claim(own, value, f"{where}/{name}")
            else:
                _check_names(module, value)
                put_part(module, name, value)
    else:
        _update(module, pending.dicts(), where)


def _check_names(module: nnx.Pytree, pending: PendingVariables) -> None:
    """Raises NameInUseError if variables lie aside because other parts have their names."""
    for path, variable in walk(pending.dicts()):
        if variable.get_metadata(DISPLACED_KEY, None) == Displaced(len(path)):
            what = f"variable of {linen_collection(variable)!r}"
            raise NameInUseError(what, path[0], type(module).__name__)


def _update(module: nnx.Pytree, given: Mapping[str, Any], where: str) -> None:
    """Puts Variables into those of a native NNX module, all of them."""
    own = {
        _address(path, node): node
        for path, node in nnx.iter_graph(module, graph=True)
        if isinstance(node, nnx.Variable)
    }
    leaves = {_address(path, x): x for path, x in walk(given)}
    found = {a: raw_value(x) for a, x in leaves.items() if a in own or not is_vacant(x)}
    values = {a: raw_value(x) for a, x in own.items()}
    needed = {a: x for a, x in values.items() if a in found or _is_abstract(x)}
    comparison = compare(needed, found)
    if comparison.unknown or not comparison.fits:
        raise comparison.error(where)
    for address, value in found.items():
        assign_raw_value(own[address], value)


def _address(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Address:
    return linen_collection(variable), tuple(map(str, path))


def _is_abstract(value: object) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
