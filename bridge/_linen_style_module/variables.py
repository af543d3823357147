"""The Variables of a `bridge.Module` by collection and name, and Variables that nobody has yet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

import registry
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.convert import state_to_linen
from bridge._conversion.linen_holder import LinenHolder, is_linen_style
from bridge._conversion.neutral import Displaced, as_dicts, nest, unplace, walk
from bridge._conversion.nnx_leaves import DISPLACED_KEY
from bridge._conversion.own_leaves import with_graphdefs
from bridge._flax.objects import attributes_of
from bridge._flax.variables import raw_value, variable_from_metadata

from .attributes import (
    AttrPriority,
    Waiting,
    has_room,
    is_free,
    is_reserved_name,
    priorities_of,
    put,
    put_part,
)


class Unclaimed(Waiting):
    """Variables that are at a place where no submodule is yet."""

    def items(self) -> Iterator[tuple[str, Any]]:
        """(name, Variable or more of these) of everything that is here."""
        for name, value in list(vars(self).items()):
            if isinstance(value, nnx.Variable | Unclaimed):
                yield name, value

    def dicts(self) -> dict[str, Any]:
        """The same as nested dicts."""
        return {n: x.dicts() if isinstance(x, Unclaimed) else x for n, x in self.items()}

    def take(self, collection: str) -> dict[str, Any]:
        """Takes out the values of a collection, as nested dicts."""
        active, found = registry.current(), {}
        for path, variable in walk(self.dicts()):
            if active.name_from_type(variable.var_type) == collection:
                displaced = variable.get_metadata(DISPLACED_KEY, None)
                is_inside = displaced is not None and displaced.length < len(path)
                found[unplace(path, displaced if is_inside else None)] = raw_value(variable)
                self.remove(path)
        return nest(found)

    def remove(self, path: Sequence[str]) -> None:
        """Removes a Variable, and what is empty without it."""
        name, *below = path
        if below:
            vars(self)[name].remove(below)
        if not below or not vars(self)[name].dicts():
            delattr(self, name)


def find(module: Any, collection: str, name: str) -> nnx.Variable[Any] | None:
    """The Variable of a module that Linen knows by this collection and name."""
    attributes = attributes_of(module)
    value = attributes.get(name)
    if isinstance(value, nnx.Variable) and _is_of(value, collection):
        return value
    for head in _heads(collection):
        holder = attributes.get(head)
        if isinstance(holder, Unclaimed):
            value = vars(holder).get(name)
            if isinstance(value, nnx.Variable) and _is_of(value, collection, displaced=True):
                return value
        elif holder is None:
            return None
    return None


def find_declared(module: Any, collection: str, name: str) -> nnx.Variable[Any] | None:
    """`find` of what a module declares now.

    The value may be nested dicts, which are no different from the variables of a submodule until
    somebody says so.
    """
    found = find(module, collection, name)
    if found is not None:
        return found
    attributes = attributes_of(module)
    heads = itertools.takewhile(lambda head: head in attributes, _heads(collection))
    for place in (attributes, *(vars(attributes[head]) for head in heads)):
        held = place.get(name)
        if isinstance(held, Unclaimed) and (value := held.take(collection)):
            if not held.dicts():
                del place[name]
            variable = made(collection, name, value)
            add(module, collection, name, variable)
            return variable
    return None


def has_below(module: Any, collection: str, name: str) -> bool:
    """Whether a submodule or a mapping of this name holds variables of a collection."""
    value = vars(module).get(name)
    if not isinstance(value, nnx.Pytree):
        return False
    state = nnx.to_flat_state(nnx.state(value, graph=True))
    active = registry.current()
    return any(
        isinstance(leaf, nnx.Variable) and active.name_from_type(leaf.var_type) == collection
        for _, leaf in state
    )


def add(module: Any, collection: str, name: str, variable: nnx.Variable[Any]) -> None:
    """Gives a module a Variable, beside one of another collection of that name."""
    other = vars(module).get(name)
    if has_room(module, name):
        put_part(module, name, variable)
    elif isinstance(other, nnx.Variable) and collection == "params":
        # As in a ToNNX: parameters keep their place.
        _displace(module, registry.current().name_from_type(other.var_type), name, other)
        put_part(module, name, variable)
    else:
        _displace(module, collection, name, variable)


def _displace(module: Any, collection: str, name: str, variable: nnx.Variable[Any]) -> None:
    """Puts a Variable below the name of its collection."""
    for head in _heads(collection):
        holder = vars(module).get(head)
        if holder is None and is_free(module, head):
            holder = Unclaimed()
            put(module, head, holder)
        if isinstance(holder, Unclaimed) and name not in vars(holder):
            variable.set_metadata(DISPLACED_KEY, Displaced(1))
            setattr(holder, name, variable)
            return


def _heads(collection: str) -> Iterator[str]:
    return (collection + "_" * n for n in itertools.count())


def _is_of(variable: nnx.Variable[Any], collection: str, *, displaced: bool = False) -> bool:
    is_displaced = variable.get_metadata(DISPLACED_KEY, None) is not None
    if is_displaced is not displaced:
        return False
    return registry.current().name_from_type(variable.var_type) == collection


def made(collection: str, name: str, value: Any, unboxed: Any = None) -> nnx.Variable[Any]:
    """A Variable of what an initializer returned: a value, a metadata box, a Variable's metadata.

    Args:
      collection: the collection.
      name: the variable's name.
      value: what the initializer returned.
      unboxed: the value to take in its place, with the same metadata.
    """
    active = registry.current()
    var_type = active.type_from_name(collection)
    if isinstance(value, nnx.VariableMetadata):
        return var_type(value)
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    leaf = linen_leaves.to_leaf(collection, (name,), value, active)
    if leaf.box is None:
        return var_type(leaf.value)
    return nnx_leaves.from_leaf(var_type, leaf)


def boxed(variable: nnx.Variable[Any]) -> Any:
    """What Linen holds of a Variable, in its metadata box."""
    active = registry.current()
    collection = active.name_from_type(variable.var_type)
    return linen_leaves.from_leaf(
        collection, nnx_leaves.to_leaf(variable, active, boxed_as_is=True), active
    )


def linen_variables(module: Any) -> dict[str, Any]:
    """The variables of a module as Linen has them; keys are not among them."""
    found: dict[int, list[tuple[tuple[Any, ...], nnx.Variable[Any]]]] = {}
    _collect(module, (), found, set())
    items = [x for pieces in found.values() for x in pieces if not isinstance(x[1], nnx.RngState)]
    return with_graphdefs(as_dicts(state_to_linen(items)), _graphdefs(module))


def _collect(
    node: Any,
    path: tuple[Any, ...],
    found: dict[int, list[tuple[tuple[Any, ...], nnx.Variable[Any]]]],
    seen: set[int],
) -> None:
    """Adds the Variables below a node, each at the path of the smallest priority."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if not is_linen_style(type(node)):
        for below, item in nnx.iter_graph(node, graph=True):
            if isinstance(item, nnx.Variable):
                own = isinstance(node, Unclaimed)
                pieces = _pieces((*path, *below), item) if own else [((*path, *below), item)]
                found.setdefault(id(item), list(pieces))
        return
    priorities, default = priorities_of(node), AttrPriority.DEFAULT
    own = [(n, x) for n, x in vars(node).items() if not is_reserved_name(n)]
    for name, value in sorted(own, key=lambda item: (priorities.get(item[0], default), item[0])):
        if isinstance(value, nnx.Variable):
            found.setdefault(id(value), list(_pieces((*path, name), value)))
        elif isinstance(value, nnx.Pytree):
            _collect(value, (*path, name), found, seen)


def _pieces(
    path: tuple[Any, ...], variable: nnx.Variable[Any]
) -> Iterator[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    """A Variable, or one for each item of the nested dicts in it: in Linen they are variables."""
    value, metadata = raw_value(variable), variable.get_metadata()
    known = {key: x for key, x in metadata.items() if key != DISPLACED_KEY}
    if not (isinstance(value, Mapping) and value and nnx_leaves.says_nothing(known)):
        yield path, variable
        return
    displaced = metadata.get(DISPLACED_KEY)
    for below, item in walk(value, empty=True):
        if displaced is not None:
            metadata[DISPLACED_KEY] = Displaced(displaced.length + len(below))
        yield (*path, *below), variable_from_metadata(variable.var_type, item, dict(metadata))


def _graphdefs(module: Any) -> tuple[Any, ...]:
    """The GraphDefs of NNX modules inside of Linen modules inside of this one, by path."""
    return tuple(
        (tuple(map(str, path)) + below, graphdef)
        for path, node in holders(module)
        for below, graphdef in node.to_nnx__graphdefs
    )


def holders(module: Any) -> Iterator[tuple[tuple[Any, ...], LinenHolder]]:
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, LinenHolder):
            yield path, node
