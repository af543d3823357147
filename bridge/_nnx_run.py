"""Runs an NNX module on Linen variables: merges it, calls it, and finds what changed.

No Linen module is in sight here; `_to_linen` reads the variables and writes the changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.core.scope import LazyRng

import registry

from . import _linen_side, _nnx_side
from ._errors import InvalidMethodError, MissingRngError
from ._flax_internals import assign_raw_value, unflatten
from ._graphdef import Slot, StaticGraphDef
from ._matching import Comparison, compare
from ._neutral import Address


@dataclasses.dataclass(frozen=True)
class Found:
    """The Linen variables of one scope, by address.

    Attributes:
      leaves: the leaves as they are, boxes included, by the address that the module knows them by.
      keys: the address under which a leaf really is, where that differs: integers come back as
        strings from a msgpack file.
    """

    leaves: Mapping[Address, Any]
    keys: Mapping[Address, Address]

    @classmethod
    def of(cls, leaves: Mapping[Address, Any], slots: tuple[Slot, ...]) -> Found:
        """Matches leaves to slots, by path or by the text of the path."""
        wanted = {slot.address for slot in slots}
        if wanted.issuperset(leaves):
            return cls(leaves, {})
        by_text = {_text(a): a for a in wanted if a not in leaves}
        keys = {a: by_text.get(_text(a), a) for a in leaves if a not in wanted}
        keys = {found: known for found, known in keys.items() if found != known}
        return cls({keys.get(a, a): v for a, v in leaves.items()}, {v: k for k, v in keys.items()})


class Merged:
    """An NNX module made of a GraphDef and Linen variables, and what it was before the call.

    Args:
      graphdef: the module's definition.
      found: the variables; every leaf but RNG state has to be there.
      seeds: for a stream's tag and shape the key that a call's `rngs` give it, None if they do not.
    """

    def __init__(self, graphdef: StaticGraphDef, found: Found, seeds: Callable[[Slot], Any]):
        self.slots = graphdef.slots
        self._found = found
        self.seeded: set[Address] = set()
        self._unseeded: set[Address] = set()
        self.values = [
            self._rng_value(slot, seeds) if slot.is_rng else _unboxed(found.leaves[slot.address])
            for slot in self.slots
        ]
        self.module, nodes = unflatten(graphdef, list(map(_as_leaf, self.slots, self.values)))
        self.variables: list[Any] = [None if s.node is None else nodes[s.node] for s in self.slots]
        self._attach_unknown()
        self._modules = [(n, len(vars(n))) for n in nodes.values() if isinstance(n, nnx.Pytree)]

    def _rng_value(self, slot: Slot, seeds: Callable[[Slot], Any]) -> Any:
        stored = self._found.leaves.get(slot.address)
        key = seeds(slot)
        if key is not None:
            self.seeded.add(slot.address)
        elif stored is not None:
            return _unboxed(stored)
        else:
            self._unseeded.add(slot.address)
        # Constants, so that a call that draws nothing has no equation for them.
        with jax.ensure_compile_time_eval():
            if slot.var_type is nnx.RngCount:
                return jax.numpy.zeros((), jax.numpy.uint32)
            return jax.random.key(0) if key is None else key

    def _attach_unknown(self) -> None:
        """Gives the module the state that only a call creates, and its definition lacks."""
        active = registry.current()
        known = {slot.address for slot in self.slots}
        self.unknown: dict[Address, nnx.Variable[Any] | None] = {}
        self._before: dict[Address, Any] = {}
        for address, leaf in self._found.leaves.items():
            if address not in known:
                self.unknown[address] = variable = self._attach(address, leaf, active)
                self._before[address] = None if variable is None else variable.get_raw_value()

    def _attach(self, address: Address, leaf: Any, active: registry.Registry) -> Any:
        collection, path = address
        parent: Any = self.module
        for key in path[:-1]:
            # nnx.List keeps its items as attributes too.
            parent = vars(parent).get(str(key))
            if not isinstance(parent, nnx.Pytree):
                return None
        name = path[-1] if path else None
        if collection == "params" or not isinstance(name, str) or hasattr(parent, name):
            return None
        variable = _nnx_side.from_leaf(
            active.type_from_name(collection), _linen_side.to_leaf(collection, path, leaf, active)
        )
        setattr(parent, name, variable)
        return variable

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        """Calls a method of the module.

        Raises:
          MissingRngError: it drew from a stream that has no key.
        """
        output = method_of(self.module, method)(self.module, *args, **kwargs)
        drawn = [
            slot.metadata.get("tag", "/".join(map(str, slot.path)))
            for slot, variable, value in zip(self.slots, self.variables, self.values, strict=True)
            if slot.address in self._unseeded and variable.get_raw_value() is not value
        ]
        if drawn:
            raise MissingRngError(
                where,
                sorted(set(drawn)),
                [],
                "pass rngs={name: key} to apply, or variables with the collections RngKey and"
                " RngCount",
            )
        return output

    def changed(self) -> dict[Address, nnx.Variable[Any]]:
        """The Variables with another value than before, those of unknown leaves included."""
        changed = {
            slot.address: variable
            for slot, variable, value in zip(self.slots, self.variables, self.values, strict=True)
            if variable is not None and (variable.ref or variable.get_raw_value() is not value)
        }
        taken_up = {
            address: variable
            for address, variable in self.unknown.items()
            if variable is not None and variable.get_raw_value() is not self._before[address]
        }
        return changed | taken_up

    def unused(self, changed: Mapping[Address, Any]) -> list[Address]:
        """The leaves that the module lacks and did not take up; sown ones do not count."""
        return [
            address
            for address, variable in self.unknown.items()
            if address not in changed
            and not (variable is not None and issubclass(variable.var_type, nnx.Intermediate))
        ]

    def created(self) -> dict[Address, nnx.Variable[Any]]:
        """The Variables that the call made."""
        if all(len(vars(node)) == size for node, size in self._modules):
            return {}
        active = registry.current()
        known = {slot.address for slot in self.slots} | set(self.unknown)
        state = nnx.to_flat_state(nnx.state(self.module, graph=True))
        addresses = [(_nnx_side.address_of(p, v, active), v) for p, v in state]
        return {a: v for a, v in addresses if a not in known and isinstance(v, nnx.Variable)}


def comparison(graphdef: StaticGraphDef, found: Found, *, rng: bool = False) -> Comparison:
    """What a GraphDef needs against what was found; only parameters are held to their shapes."""
    expected: dict[Address, Any] = {}
    avals = graphdef.avals or (None,) * len(graphdef.slots)
    leaves = {a: _unboxed_for_shape(v) for a, v in found.leaves.items()}
    for slot, aval in zip(graphdef.slots, avals, strict=True):
        if slot.is_rng and not rng:
            leaves.pop(slot.address, None)
            continue
        is_param = slot.var_type is not None and issubclass(slot.var_type, nnx.Param)
        known = aval if aval is not None and (is_param or slot.address not in leaves) else None
        expected[slot.address] = leaves.get(slot.address, _Anything()) if known is None else known
    return compare(expected, leaves)


class _Anything:
    """Stands for a leaf whose shape is not known."""

    shape = ()
    dtype = "a leaf"


def overlay(variables: list[Any], slots: tuple[Slot, ...], found: Found) -> None:
    """Puts the values that exist into a module that was just constructed."""
    for variable, slot in zip(variables, slots, strict=True):
        if slot.address in found.leaves and isinstance(variable, nnx.Variable):
            assign_raw_value(variable, _unboxed(found.leaves[slot.address]))


def method_of(module: Any, method: Any) -> Callable[..., Any]:
    """The function to call for a `nnx_method`: a name, a function of the module, or None."""
    name = "__call__" if method is None else method
    found = getattr(type(module), name, None) if isinstance(name, str) else name
    if not callable(found):
        own = {n for n in dir(type(module)) if callable(getattr(type(module), n, None))}
        own -= set(dir(nnx.Module))
        raise InvalidMethodError(
            type(module), method, [n for n in own if not n.startswith("_")] or ["__call__"]
        )
    return found


def seed(key: Any, slot: Slot) -> Any:
    """The key of a stream for one call: another one for every stream at every path."""
    folded = LazyRng.create(key, *map(str, slot.path[:-1])).as_jax_rng()
    is_typed = jax.numpy.issubdtype(folded.dtype, jax.dtypes.prng_key)
    return folded if is_typed else jax.random.wrap_key_data(folded)


def _as_leaf(slot: Slot, value: Any) -> Any:
    return jax.new_ref(value) if slot.metadata is not None and slot.metadata.get("ref") else value


def _unboxed(leaf: Any) -> Any:
    value = leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf
    # A restored checkpoint holds NumPy arrays, which a Variable would write into.
    return jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value


def _unboxed_for_shape(leaf: Any) -> Any:
    # unbox may put a sharding constraint on the value, which is an equation in the program.
    return getattr(leaf, "value", leaf) if isinstance(leaf, meta.AxisMetadata) else leaf


def _text(address: Address) -> tuple[str, ...]:
    return address[0], *map(str, address[1])
