"""The Linen variables of a module: the leaf of its GraphDef that each is, and places for others."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.core import meta

import registry
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder
from bridge._conversion.matching import Comparison, same_shape
from bridge._conversion.neutral import Address, Path, nest, walk
from bridge._conversion.nnx_meta import NNXMeta
from bridge._flax.variables import assign_raw_value
from bridge._graphdefs.leaves import GraphDefLeaf, GraphDefLeaves
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._randomness.typed_keys import from_bits
from bridge._sharding.explicit_axes import any_explicit
from bridge._types import VARIABLE, Variable


class MatchedVariables:
    """The leaves of Linen variables, against the slots of a GraphDef.

    Args:
      graphdef: the definition of the module that the variables are for.
      leaves: the variables by address, without GraphDefs; they may be anything.
      arguments: the arrays that the constructor is given and the module keeps as they are, by
        address. Variables come before them: a call may have put another array in their place.

    Attributes:
      slots: the slots of the definition.
      avals: shape and dtype of every slot, None where they are not known.
      leaves: the leaves as they are, boxes included, by the address that the module knows them by.
      unknown: those that no slot is for.
    """

    def __init__(
        self,
        graphdef: StaticGraphDef,
        leaves: Mapping[Address, Any],
        arguments: Mapping[Address, Any] = MappingProxyType({}),
    ):
        self.graphdef = graphdef
        self.slots = slots = graphdef.slots
        self.avals: Sequence[Any] = graphdef.avals or (None,) * len(slots)
        self._given = leaves
        self._moved: dict[Address, Address] = {}
        known = slots.addresses
        if len(leaves) != len(known) or not known.issuperset(leaves):
            leaves, self._moved = _by_text(slots, self.avals, leaves)
        self.leaves = {**arguments, **leaves} if arguments else leaves
        self.unknown = {a: leaf for a, leaf in self.leaves.items() if a not in known}

    def placed(self, address: Address) -> Address:
        """Where a leaf is in the variables, or will be: with text for keys, if a file has such."""
        if address in self._moved or address in self._given:
            return self._moved.get(address, address)
        collection, path = address
        is_text = any(moved == collection for moved, _ in self._moved)
        return collection, tuple(map(str, path)) if is_text else path

    @property
    def values(self) -> list[Any]:
        """What the Variables are to hold, in the order of the slots; None for absent RNG state."""
        values: list[Any] = []
        for slot, aval in zip(self.slots, self.avals, strict=True):
            leaf = self.leaves.get(slot.address) if slot.is_rng else self.leaves[slot.address]
            # Cheap test first: most leaves are arrays.
            is_value = leaf is None or isinstance(leaf, jax.Array)
            values.append(leaf if is_value else unboxed(leaf, aval))
        return values

    def comparison(self, *, rng: bool = False) -> Comparison:
        """What the GraphDef needs against what was found, RNG state included if `rng`.

        Only parameters and batch statistics are held to their shapes; a cache may grow.
        """
        missing: list[Address] = []
        mis_shaped: list[Address] = []
        expected: dict[Address, Any] = {}
        found: dict[Address, Any] = {}
        for slot, aval in zip(self.slots, self.avals, strict=True):
            leaf = self.leaves.get(slot.address, _ABSENT)
            if leaf is _ABSENT:
                if rng or not slot.is_rng:
                    missing.append(slot.address)
                    expected[slot.address] = _Anything() if aval is None else aval
            elif slot.has_fixed_shape and aval is not None:
                if isinstance(leaf, jax.Array) and leaf.shape == getattr(aval, "shape", None):
                    continue
                value = _inside(leaf)
                if not same_shape(aval, value):
                    mis_shaped.append(slot.address)
                    expected[slot.address], found[slot.address] = aval, value
        return Comparison(tuple(missing), tuple(mis_shaped), tuple(self.unknown), expected, found)


_ABSENT = object()


def overlay(module_leaves: list[Any], found: MatchedVariables) -> None:
    """Puts the values that exist into a module that was just constructed."""
    for leaf, slot in zip(module_leaves, found.slots, strict=True):
        if slot.address in found.leaves and slot.var_type is not None:
            assign_raw_value(leaf, unboxed(found.leaves[slot.address]))


def unboxed(leaf: Any, aval: object = None) -> Any:
    """The value of a leaf as a Variable can hold it.

    `aval` is the shape and dtype that it had when the module was made, None if they are not known.
    """
    box = leaf
    if isinstance(leaf, jax.Array):
        return leaf
    # A box of Linen's constrains what it gives out, which JAX refuses for Explicit axes.
    is_constrained = isinstance(leaf, meta.AxisMetadata) and not any_explicit()
    value: Any = box.unbox() if is_constrained else _inside(box)
    # A restored checkpoint holds NumPy arrays and scalars, into which a Variable would write.
    # A pytree that has a dtype stays as it is, such as the quantized weights of a library.
    is_of_jax = not hasattr(value, "dtype") or isinstance(value, _OF_JAX)
    if is_of_jax or not jax.tree_util.all_leaves([value]):
        return value
    was = getattr(aval, "dtype", None)
    if was is None or value.dtype != was or jax.dtypes.canonicalize_dtype(was) == was:
        return jax.numpy.asarray(value)  # pyright: ignore
    # JAX does not have the dtype that the module was made with. A write in place would go
    # unnoticed, so it is refused.
    copied: Any = copy.copy(value)
    if isinstance(value, np.ndarray):
        copied.setflags(write=False)
    return copied


_OF_JAX: Any = (jax.Array, jax.ShapeDtypeStruct)


class _Anything:
    """Stands for a leaf whose shape is not known."""

    shape = ()
    dtype = "a leaf"


def _inside(leaf: object) -> Any:
    box = leaf
    # unbox may put a sharding constraint on the value, which is an equation in the program.
    if isinstance(leaf, NNXMeta | meta.Partitioned):
        return leaf.value
    if isinstance(leaf, meta.AxisMetadata):
        return registry.current().codec_for(box.__class__).to_fields(box)[0]
    return box


def _by_text(
    slots: GraphDefLeaves, avals: Sequence[Any], leaves: Mapping[Address, Any]
) -> tuple[dict[Address, Any], dict[Address, Address]]:
    """Leaves by the addresses of the slots, also if a file has turned the keys into text.

    A file calls the value of a box `value`, and does not record that it was a box. A dict has its
    own keys; Linen variables cannot hold an empty one. A leaf without a slot stays at its own
    address.
    """
    rest = {_text(address): address for address in leaves if address not in slots.addresses}
    found: dict[Address, Any] = {}
    moved: dict[Address, Address] = {}
    for slot, aval in zip(slots, avals, strict=True):
        shapes: Any = aval
        is_dict = type(aval) is dict
        if slot.address in leaves or not (rest or is_dict):
            continue
        text = _text(slot.address)
        if text in rest:
            moved[slot.address] = rest.pop(text)
            found[slot.address] = leaves[moved[slot.address]]
        elif is_dict:
            below = [other for other in rest if other[: len(text)] == text]
            held = {other[len(text) :]: leaves[rest[other]] for other in below}
            if (value := _as_dict(slot, shapes, held)) is not None:
                found[slot.address] = value
                rest = {other: a for other, a in rest.items() if other not in below}
        elif (*text, "value") in rest:
            found[slot.address] = from_bits(aval, leaves[rest.pop((*text, "value"))])
    others = {*slots.addresses, *rest.values()}
    return {**{a: leaf for a, leaf in leaves.items() if a in others}, **found}, moved


def _as_dict(slot: GraphDefLeaf, aval: Mapping[Any, Any], below: Mapping[Path, Any]) -> Any:
    """The dict that a Variable holds, of what lies below its place; None if this is not it."""
    wanted: set[Path] = {tuple(map(str, path)) for path, _ in walk(aval)}
    inner = {path[1:]: leaf for path, leaf in below.items() if path[0] == "value" and path[1:]}
    # The dict may have a key of that name itself.
    may_be_boxed = set(inner) == wanted or "value" not in aval
    is_boxed = 0 < len(inner) == len(below) and set(below) != wanted and may_be_boxed
    below = inner if is_boxed else below
    is_whole = set(below) == wanted
    # That of a cache may have other entries by now.
    if not is_whole and (not below or slot.has_fixed_shape):
        return None
    value = _with_keys(aval, below, ()) if is_whole else nest(below)
    if slot.var_type is None or not is_boxed:
        return value
    # With its box again, as an update has the form that was given.
    box: Any = NNXMeta
    return box(slot.var_type, value, dict(slot.metadata))


def _with_keys(aval: Mapping[Any, Any], below: Mapping[Path, Any], path: Path) -> dict[Any, Any]:
    """The dict with the keys that it had, which a file keeps as text."""
    return {
        key: _with_keys(aval[key], below, (*path, str(key)))
        if isinstance(item, Mapping)
        else below[(*path, str(key))]
        for key, item in aval.items()
    }


def _text(address: Address) -> tuple[str, ...]:
    return address[0], *map(str, address[1])


class Attached(NamedTuple):
    """A leaf that has found a place in a module: its Variable or bare array.

    `is_linen` says whether it belongs to a wrapped Linen module, which reads all of its variables.
    """

    item: Any
    is_linen: bool


def attach(module: nnx.Pytree, unknown: Mapping[Address, Any]) -> dict[Address, Attached]:
    """Puts leaves into a module where nothing is yet: no attribute, or None.

    It never adds a parameter, because the definition has even those that a call creates. Any other
    parameter is ignored, as in Linen; in the place of a None it would give a bias to a layer that
    was made without one.

    The module is changed, so it must belong to the caller. Returns each leaf that has found a
    place.
    """
    active = registry.current()
    attached: dict[Address, Attached] = {}
    # Items of a list in their order, whatever mapping they come from.
    for address in sorted(unknown, key=_list_order):
        collection, path = address
        if collection == "params" or not path:
            continue
        neutral = linen_leaves.to_leaf(collection, path, unknown[address], active)
        if collection == ARRAYS and neutral.box is None:
            item = neutral.value
        else:
            item = nnx_leaves.from_leaf(active.type_from_name(collection), neutral)
        owner = _put(module, path, item)
        if owner is not None:
            attached[address] = Attached(item, isinstance(owner, LinenHolder))
    return attached


@contextlib.contextmanager
def noting_reads(attached: Mapping[Address, Attached], read: set[Address]) -> Generator[None]:
    """Notes which attached leaves a call reads, by get hooks of their Variables.

    A wrapped Linen module reads all of its variables.
    """
    read.update(address for address, (_, is_linen) in attached.items() if is_linen)
    hooked: list[tuple[Variable, Any]] = []
    for address, (item, is_linen) in attached.items():
        if not is_linen and isinstance(item, VARIABLE):
            own = item.get_metadata("on_get_value", None)
            hook = functools.partial(_note_read, read, address, own)
            item.set_metadata(on_get_value=hook)
            hooked.append((item, own))
    try:
        yield
    finally:
        for variable, own in hooked:
            if own is None:
                variable.del_metadata("on_get_value")
            else:
                variable.set_metadata(on_get_value=own)


def _note_read(
    read: set[Address],
    address: Address,
    own: Callable[[Any, Any], Any] | None,
    variable: Variable,
    value: object,
) -> Any:
    read.add(address)
    return value if own is None else own(variable, value)


def _put(module: object, path: Path, item: object) -> Any:
    """Puts an item at a path below a module, if that is free and there is something to hold it.

    Returns the NNX object that has it now, None if there is no place for it.
    """
    node = owner = module
    for position, key in enumerate(path[:-1]):
        child = _child(node, key)
        if child is _ABSENT and isinstance(node, dict | LinenHolder):
            # Elsewhere a missing level may be a module, which only the call can create.
            for name in reversed(path[position + 1 :]):
                item = {name: item}
            return owner if _put_child(node, key, item) else None
        node = child
        owner = node if isinstance(node, nnx.Pytree) else owner
    return owner if _put_child(node, path[-1], item) else None


def _put_child(node: Any, key: Any, item: object) -> bool:
    items: Any = node
    is_object, is_list = isinstance(node, nnx.Pytree), isinstance(node, nnx.List | list)
    if is_list and str(key) == str(len(items)):
        items.append(nnx.data(item) if is_object else item)
        return True
    child = _child(node, key)
    if child is not None and (is_list or child is not _ABSENT):
        return False
    if is_object and isinstance(key, str | int):
        if inspect.getattr_static(items.__class__, str(key), None) is not None:
            return False
        # Marked, for a None was static.
        setattr(items, str(key), nnx.data(item))
    elif isinstance(node, dict | list):
        items[int(key) if is_list else key] = item
    else:
        return False
    return True


def _child(node: Any, key: object) -> Any:
    """What is below a node; keys are compared as text, as files keep them."""
    if isinstance(node, nnx.Pytree):
        return vars(node).get(str(key), _ABSENT)
    items: Any = node
    if isinstance(node, list | tuple):
        items = {i: items[i] for i in range(len(items))}
    elif not isinstance(node, Mapping):
        return _ABSENT
    if key in items:
        return items[key]
    return next((item for name, item in items.items() if str(name) == str(key)), _ABSENT)


def _list_order(address: Address) -> list[Any]:
    return [(0, int(k), "") if str(k).isdecimal() else (1, 0, str(k)) for k in address[1]]
