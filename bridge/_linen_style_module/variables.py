"""The Linen variables of a `bridge.Module`: found, added, taken in and given out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

import registry
from bridge._conversion import linen_attributes, linen_leaves, nnx_leaves
from bridge._conversion.arrays import is_abstract
from bridge._conversion.convert import state_to_linen
from bridge._conversion.inner_boxes import boxed, is_plain, unboxed_within
from bridge._conversion.linen_attributes import LinenHolder, LinenStyle
from bridge._conversion.matching import compare
from bridge._conversion.neutral import Address, Displaced, as_dicts, nest, walk
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._errors import ImmutableCollectionError, NameInUseError
from bridge._flax.objects import attributes_of
from bridge._flax.variables import assign_raw_value, raw_value

from .attributes import (
    AttrPriority,
    has_room,
    is_part,
    is_reserved_name,
    names_of,
    priorities_of,
    put_part,
)


def find(module: nnx.Pytree, collection: str, name: str) -> nnx.Variable[Any] | None:
    """The Variable of a module that Linen knows by this collection and name."""
    value = attributes_of(module).get(name)
    is_variable = isinstance(value, nnx.Variable)
    return value if is_variable and linen_collection(value) == collection else None


def linen_collection(variable: nnx.Variable[Any]) -> str:
    """The collection that a Variable belongs to."""
    return registry.current().name_from_type(variable.var_type)


def find_declared(module: nnx.Pytree, collection: str, name: str) -> nnx.Variable[Any] | None:
    """`find` of what a module declares now.

    The value may be nested dicts, which look like the variables of a submodule until they are
    declared.
    """
    held = attributes_of(module).get(name)
    if isinstance(held, dict):
        leaves = walk(held)
        if all(linen_collection(variable) == collection for _, variable in leaves):
            delattr(module, name)
            value = nest({path: boxed(variable) for path, variable in leaves})
            add(module, collection, name, made(collection, name, value))
    return find(module, collection, name)


def held_below(module: nnx.Pytree, collection: str, name: str) -> Any:
    """What a submodule or a mapping of this name holds in a collection, None if there is none."""
    value = vars(module).get(name)
    is_node = isinstance(value, nnx.Pytree | dict)
    return linen_variables(value).get(collection) if is_node else None


def add(module: nnx.Pytree, collection: str, name: str, variable: nnx.Variable[Any]) -> None:
    """Gives a module a Variable. Raises NameInUseError if another part has its name."""
    if not has_room(module, name):
        raise NameInUseError(f"variable of {collection!r}", name, type(module).__name__)
    put_part(module, name, variable)


def made(collection: str, name: str, value: object) -> nnx.Variable[Any]:
    """A Variable of what an initializer returned: a value, a box, or a Variable's metadata."""
    active = registry.current()
    var_type = active.type_from_name(collection)
    if isinstance(value, nnx.VariableMetadata):
        return var_type(value)
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    leaf = linen_leaves.to_leaf(collection, (name,), value, active)
    if leaf.box is not None:
        return nnx_leaves.from_leaf(var_type, leaf)
    return unboxed_within(var_type(leaf.value))


def immutable(module: nnx.Pytree, collection: str) -> ImmutableCollectionError:
    """The error for a call that updates a collection that it may not."""
    remedy = "with apply(…, {mutable})"
    return ImmutableCollectionError(type(module).__name__, collection, remedy)


def is_vacant(value: object) -> bool:
    """Whether a value is what was given as an empty dict: a variable's, or that of a submodule."""
    held = raw_value(value) if isinstance(value, nnx.Variable) else None
    return isinstance(held, Mapping) and not held


def install(module: nnx.Pytree, variables: Mapping[str, Any]) -> None:
    """Gives a module Linen variables, those of submodules that it does not have yet as well.

    The inverse of `linen_variables`.
    """
    linen_leaves.check_variables(variables)
    leaves = linen_attributes.as_arrays(linen_leaves.from_variables(variables))
    # An empty dict is a variable's value, unless something else is below its path.
    above = {path[:i] for _, path in leaves for i in range(len(path))} | {()}
    kept = {(c, path): x for (c, path), x in leaves.items() if not x.is_empty or path not in above}
    found = nnx_leaves.to_leaves(kept, all_variables=True)
    tree = nest({tuple(map(str, path)): unboxed_within(x) for path, x in found.items()})
    claim(module, tree, where=f"{type(module).__name__}")


def claim(module: nnx.Pytree, pending: Mapping[str, Any], where: str) -> None:
    """Gives the Variables at a module's place to the module, which may be any NNX module.

    Those that nobody has declared, or whose submodule is not there yet, stay in nested dicts.

    Raises MismatchError if the module has no place for one, lacks one, or has one of another shape.
    """
    if isinstance(module, LinenHolder):
        for name, value in pending.items():
            setattr(module, name, nnx.data(value))
    elif isinstance(module, LinenStyle):
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
        _update(module, pending, where)


def _check_names(module: nnx.Pytree, pending: Mapping[str, Any]) -> None:
    """Raises NameInUseError if variables lie aside because other parts have their names."""
    for path, variable in walk(pending):
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
    needed = {a: x for a, x in values.items() if a in found or is_abstract(x)}
    comparison = compare(needed, found)
    if comparison.unknown or not comparison.fits:
        raise comparison.error(where)
    for address, value in found.items():
        assign_raw_value(own[address], value)


def _address(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Address:
    return linen_collection(variable), tuple(map(str, path))


def linen_variables(module: nnx.Pytree | dict[str, Any]) -> dict[str, Any]:
    """The variables of a module as Linen has them; keys are not among them."""
    seen: set[int] = set()
    references: list[tuple[tuple[Any, ...], Any]] = [((), module)]
    # A reference adds nothing where the owner is below this module.
    found = [x for path, node in references for x in _collected(node, path, seen, references)]
    items = [x for x in found if not isinstance(x[1], nnx.RngState)]
    return as_dicts(state_to_linen(items))


def _collected(
    node: Any,
    path: tuple[Any, ...],
    seen: set[int],
    references: list[tuple[tuple[Any, ...], Any]],
) -> Iterator[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    """The Variables in or below a node that nobody has seen, each at the path of its owner.

    Attributes that refer to what another module owns go to `references`, which come after all
    others.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, nnx.Variable):
        yield from _pieces(path, node)
        return
    if not isinstance(node, LinenStyle):
        for below, item in nnx.iter_graph(node, graph=True):
            if isinstance(item, nnx.Variable):
                yield from _collected(item, (*path, *below), seen, references)
        return
    priorities = priorities_of(node)
    order = {n: priorities.get(n, AttrPriority.DEFAULT) for n in vars(node)}
    fields = {*type(node).__dataclass_fields__} - {*names_of(node)}
    own = [(n, x) for n, x in vars(node).items() if not is_reserved_name(n) and is_part(x)]
    # What a module declares comes before the fields of those that it gives it to.
    own.sort(key=lambda item: (not isinstance(item[1], nnx.Variable), order[item[0]], item[0]))
    for name, value in own:
        is_given = isinstance(value, nnx.Variable) and name in fields
        if is_given or order[name] == AttrPriority.LOW:
            references.append(((*path, name), value))
        else:
            yield from _collected(value, (*path, name), seen, references)


def _pieces(
    path: tuple[Any, ...], variable: nnx.Variable[Any]
) -> Iterator[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    """A Variable, or one for each item of the nested dicts in it: in Linen they are variables."""
    value, displaced = raw_value(variable), variable.get_metadata(DISPLACED_KEY, None)
    if isinstance(value, jax.Array) or not is_plain(variable):
        yield path, variable
        return
    active, collection = registry.current(), linen_collection(variable)
    held = boxed(variable)
    for below, item in walk(held, empty=True) if isinstance(held, Mapping) else [((), held)]:
        own = None if displaced is None else Displaced(displaced.length + len(below))
        leaf = linen_leaves.to_leaf(collection, (*path, *below), item, active)
        yield (*path, *below), nnx_leaves.from_leaf(variable.var_type, leaf, own)
