"""An NNX module on Linen variables: merges it, calls it, and finds what changed.

No Linen module is in sight here; `_to_linen` reads the variables and writes the changes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

import registry

from . import _linen_side, _nnx_side
from ._errors import InvalidMethodError, MissingRngError
from ._flax_internals import held_value, mark_tabulated
from ._found import Found, slot_avals
from ._neutral import Address, Path
from ._slots import Slot


class Merged:
    """An NNX module made of a GraphDef and Linen variables, and what it was before the call.

    Args:
      found: the variables and the module's definition; every leaf but RNG state has to be there.
      seed: for a slot of an RNG stream the key that the call's `rngs` give to the stream, None if
        they give none.
      is_mutable: whether updates of a collection are kept. Where they are not, Variables are plain
        ones: neither references, whose updates nothing tells from a read, nor hijax Variables,
        which cannot be differentiated.
    """

    def __init__(
        self,
        found: Found,
        seed: Callable[[Slot], Any],
        is_mutable: Callable[[str], bool] = lambda collection: True,
    ):
        graphdef = found.graphdef
        self._slots = slots = graphdef.slots
        self._seeded: set[Address] = set()
        self._unseeded: set[Address] = set()
        self._read: set[Address] = set()
        self._values = found.values
        for i in slots.rng:
            self._values[i] = self._rng_value(
                slots[i], slot_avals(graphdef)[i], self._values[i], seed
            )
        plain = {i for i in slots.special if not is_mutable(slots[i].address[0])}
        leaves = list(self._values)
        for i in slots.references:
            if i not in plain:
                leaves[i] = jax.new_ref(leaves[i])
        self.module, self._variables, objects = graphdef.blueprint.build(leaves, plain)
        self._unknown = self._attach(found.unknown)
        mark_tabulated(objects)
        self._held = operator.methodcaller("get_raw_value") if slots.special else held_value
        self._objects = objects
        self._sizes = list(map(len, map(vars, objects)))
        # What the call changes; found out once, when it is over.
        self._changed: list[tuple[Slot, Any]] = []

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        """Calls a method of the module.

        Raises:
          MissingRngError: it drew from a stream that has no key.
        """
        output = method_of(self.module, method)(*args, **kwargs)
        self._changed = list(self._changed_slots())
        drawn = {
            slot.metadata.get("tag", "/".join(map(str, slot.path)))
            for slot, _ in self._changed
            if slot.address in self._unseeded
        }
        if drawn:
            raise MissingRngError(
                where,
                sorted(drawn),
                [],
                "pass rngs={name: key} to apply, or variables with the collections RngKey and"
                " RngCount",
            )
        return output

    def changed(self) -> dict[Address, Any]:
        """The Variables and bare arrays that are others than before, by address.

        A stream that the call's own `rngs` seeded is not among them: its state is not the model's.
        """
        changed = {
            slot.address: item for slot, item in self._changed if slot.address not in self._seeded
        }
        for address, (variable, before) in self._unknown.items():
            if variable is not None and variable.get_raw_value() is not before:
                _forget_reads(variable)
                changed[address] = variable
        return changed

    def drawn(self) -> set[Address]:
        """The seeded leaves of the streams that the call drew from."""
        return {slot.address for slot, _ in self._changed if slot.address in self._seeded}

    def created(self) -> dict[Address, nnx.Variable[Any]]:
        """The Variables that the call made, by address."""
        if list(map(len, map(vars, self._objects))) == self._sizes:
            return {}
        active = registry.current()
        known = self._slots.addresses | set(self._unknown)
        state = nnx.to_flat_state(nnx.state(self.module, graph=True))
        addresses = [(_nnx_side.address_of(p, v, active), v) for p, v in state]
        return {a: v for a, v in addresses if a not in known and isinstance(v, nnx.Variable)}

    def refused(self) -> list[Address]:
        """The leaves that have no place in the module."""
        active = registry.current()
        return [
            address
            for address, (variable, _) in self._unknown.items()
            if variable is None and not _is_sown(address, active)
        ]

    def unused(self, changed: Mapping[Address, Any]) -> list[Address]:
        """The leaves that the definition lacks, and that the call neither read nor changed."""
        active = registry.current()
        return [
            address
            for address in self._unknown
            if address not in changed
            and address not in self._read
            and not _is_sown(address, active)
        ]

    def _rng_value(self, slot: Slot, aval: Any, stored: Any, seed: Callable[[Slot], Any]) -> Any:
        key = seed(slot)
        if key is not None:
            self._seeded.add(slot.address)
        elif stored is not None:
            return stored
        else:
            self._unseeded.add(slot.address)
        shape = getattr(aval, "shape", ())
        # Constants, so that a call that draws nothing has no equation for them.
        with jax.ensure_compile_time_eval():
            if slot.var_type is nnx.RngCount:
                return jax.numpy.zeros(shape, jax.numpy.uint32)
            key = jax.random.key(0) if key is None else key
            return jax.random.split(key, shape) if shape else key

    def _attach(
        self, unknown: Mapping[Address, Any]
    ) -> dict[Address, tuple[nnx.Variable[Any] | None, Any]]:
        """Gives the module the state that only a call creates, and its definition lacks."""
        active = registry.current()
        attached: dict[Address, tuple[nnx.Variable[Any] | None, Any]] = {}
        for address, leaf in unknown.items():
            variable = self._attached(address, leaf, active)
            # Not `variable and …`: a Variable is as true as its value.
            before = None if variable is None else variable.get_raw_value()
            attached[address] = variable, before
        return attached

    def _attached(self, address: Address, leaf: Any, active: registry.Registry) -> Any:
        collection, path = address
        parent = value_at(self.module, path[:-1])
        name = path[-1] if path else None
        if collection == "params" or not isinstance(name, str):
            return None
        if not isinstance(parent, nnx.Pytree) or hasattr(parent, name):
            return None
        neutral = _linen_side.to_leaf(collection, path, leaf, active)
        variable = _nnx_side.from_leaf(active.type_from_name(collection), neutral)
        variable.set_metadata(on_get_value=functools.partial(_note, self._read, address))
        setattr(parent, name, variable)
        return variable

    def _changed_slots(self) -> Iterator[tuple[Slot, Any]]:
        for slot, variable, value in zip(self._slots, self._variables, self._values, strict=True):
            if variable is None:
                item = value_at(self.module, slot.path)
                if item is not value:
                    yield slot, item
            elif self._held(variable) is not value:
                # Of a reference it is always another.
                yield slot, variable


def method_of(module: Any, method: Any) -> Callable[..., Any]:
    """The callable for a `nnx_method`: a name, a function of the module, or None for a call."""
    if isinstance(method, str | None):
        found = getattr(module, method or "__call__", None)
    else:
        found = functools.partial(method, module) if callable(method) else None
    if not callable(found):
        own = {n for n in dir(type(module)) if callable(getattr(type(module), n, None))}
        public = [n for n in own - set(dir(nnx.Module)) if not n.startswith("_")]
        raise InvalidMethodError(type(module), method, public or ["__call__"])
    return found


def value_at(module: Any, path: Path) -> Any:
    """What is at a path below a module, None if there is nothing."""
    for key in path:
        # nnx.List keeps its items as attributes too.
        children = {str(k): v for k, v in _children(module).items()}
        if str(key) not in children:
            return None
        module = children[str(key)]
    return module


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, nnx.Pytree):
        return vars(node)
    if isinstance(node, Mapping):
        return node
    return dict(enumerate(node)) if isinstance(node, list | tuple) else {}


def _note(read: set[Address], address: Address, variable: Any, value: Any) -> Any:
    read.add(address)
    return value


def _forget_reads(variable: nnx.Variable[Any]) -> None:
    if isinstance(variable.get_metadata("on_get_value", None), functools.partial):
        variable.del_metadata("on_get_value")


def _is_sown(address: Address, active: registry.Registry) -> bool:
    return issubclass(active.type_from_name(address[0]), nnx.Intermediate)
