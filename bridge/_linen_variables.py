"""The Linen variables that a ToNNX holds as attributes: reading, adding and updating them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import registry

from . import _linen_side, _nnx_side
from ._errors import ReservedNameError
from ._flax_internals import assign_raw_value
from ._neutral import Address, Leaf, Neutral, Path, as_dicts, nest, walk

OWN_PREFIX = "to_nnx__"
# The collections that hold no state to be carried from call to call.
_NOT_STATE = frozenset({"params", "intermediates", "perturbations"})


class Held(NamedTuple):
    """A Linen variable inside a wrapper."""

    path: Path
    variable: nnx.Variable[Any]
    leaf: Leaf


def held_variables(wrapper: nnx.Module) -> dict[Address, Held]:
    """Every Linen variable of a wrapper by (collection, path).

    Plain attributes and what NNX's tools leave on a module are no Variables and are passed over.
    """
    active = registry.current()
    found: list[tuple[Path, nnx.Variable[Any]]] = []
    for name, value in vars(wrapper).items():
        if not is_own_name(name):
            _find_variables((name,), value, found)
    return {
        _nnx_side.address_of(path, variable, active): Held(
            path, variable, _nnx_side.to_leaf(variable, active, boxed_as_is=True)
        )
        for path, variable in found
    }


def is_own_name(name: str) -> bool:
    """Whether an attribute belongs to the wrapper or to NNX rather than to the Linen module."""
    return name.startswith((OWN_PREFIX, "_pytree__")) or name == "__captures__"


def to_linen(held: Mapping[Address, Held], *, boxed: bool = True) -> dict[str, Any]:
    """Nested dicts for `module.apply`, made anew so that Linen may write into them.

    Args:
      held: the variables.
      boxed: whether values come in their metadata boxes, as Linen itself has them.
    """
    active = registry.current()
    return nest(
        {
            (collection, *path): _linen_side.from_leaf(
                collection, entry.leaf if boxed else Leaf(entry.leaf.value), active
            )
            for (collection, path), entry in held.items()
        }
    )


def state_collections(held: Mapping[Address, Held]) -> tuple[str, ...]:
    """The collections that training updates, among those that exist."""
    return tuple(sorted({collection for collection, _ in held} - _NOT_STATE))


def store(
    wrapper: nnx.Module,
    changed: Neutral,
    held: Mapping[Address, Held],
    *,
    update: bool = True,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Puts leaves into a wrapper: all of them, or none if anything raises.

    Args:
      wrapper: the module that holds the variables.
      changed: leaves; those with a Variable go into it, unless the value is the same object, and
        the others get a Variable.
      held: the Variables that are there.
      update: whether Variables that are there are touched.
      then: what else belongs to the change; if it raises, nothing has happened.

    Raises:
      ReservedNameError: a name starts with the wrapper's own prefix.
      TraceContextError: a Variable or the wrapper belongs to another trace.
    """
    new = {address: leaf for address, leaf in changed.items() if address not in held}
    empty = [(a, entry) for a, entry in held.items() if entry.leaf.is_empty] if new else []
    filled = [
        entry.path
        for (collection, path), entry in empty
        if any(c == collection and p[: len(path)] == path for c, p in new)
    ]
    occupied = [entry.path for entry in held.values() if entry.path not in filled] if new else []
    leaves = _nnx_side.to_leaves(new, occupied)
    for path in leaves:
        if is_own_name(str(path[0])):
            raise ReservedNameError(str(path[0]))
    attributes = dict(vars(wrapper))
    written: list[tuple[nnx.Variable[Any], Any, dict[str, Any]]] = []
    try:
        for address in held.keys() & changed.keys() if update else ():
            entry, leaf = held[address], changed[address]
            before = entry.variable.get_metadata()
            if leaf.value is not entry.leaf.value:
                assign_raw_value(entry.variable, leaf.value)
                written.append((entry.variable, entry.leaf.value, before))
            if leaf.box is not None and leaf.fields != entry.leaf.fields:
                entry.variable.set_metadata(**leaf.fields)
        for path in filled:
            _remove(wrapper, path)
        for name, value in nest(leaves).items():
            setattr(wrapper, name, nnx.data(_merged(vars(wrapper).get(name), value)))
        then()
    except BaseException:
        for variable, value, metadata in written:
            assign_raw_value(variable, value)
            variable.set_metadata(metadata)
        vars(wrapper).clear()
        vars(wrapper).update(attributes)
        raise


def graphdefs_in(variables: Mapping[str, Any]) -> tuple[tuple[Path, nnx.GraphDef[Any]], ...]:
    """The GraphDefs in Linen variables by path, hashable."""
    found = walk(variables.get("nnx", {}))
    return tuple((path, leaf) for path, leaf in found if isinstance(leaf, nnx.GraphDef))


def nnx_collection(graphdefs: tuple[tuple[Path, nnx.GraphDef[Any]], ...]) -> dict[str, Any]:
    """The inverse of `graphdefs_in`."""
    return {"nnx": nest(dict(graphdefs))} if graphdefs else {}


def as_arrays(neutral: Neutral) -> Neutral:
    """The NumPy arrays of a restored checkpoint as JAX arrays: Variables are written into."""

    def convert(value: Any) -> Any:
        return jax.numpy.asarray(value) if isinstance(value, np.ndarray | np.generic) else value

    return {
        address: leaf._replace(value=jax.tree.map(convert, leaf.value))
        for address, leaf in neutral.items()
    }


# Not a generator, which would be one for each level: a ToNNX reads its variables at each call.
def _find_variables(path: Path, value: Any, found: list[tuple[Path, nnx.Variable[Any]]]) -> None:
    # Asked first, as `isinstance(…, nnx.Variable)` takes its time to say no.
    if isinstance(value, dict):
        for key, child in value.items():
            _find_variables((*path, key), child, found)
    elif isinstance(value, nnx.Variable):
        found.append((path, value))


def _merged(old: Any, new: Any) -> Any:
    """`new` laid over copies of the dicts in `old`: a call that fails must leave no trace."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _remove(wrapper: nnx.Module, path: Path) -> None:
    if len(path) == 1:
        delattr(wrapper, path[0])
        return
    node = as_dicts(vars(wrapper)[path[0]])
    parent = node
    for key in path[1:-1]:
        parent = parent[key]
    del parent[path[-1]]
    setattr(wrapper, path[0], nnx.data(node))
