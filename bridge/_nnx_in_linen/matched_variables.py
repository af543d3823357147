"""The Linen variables of a module: which of them is which leaf of its GraphDef."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax.core import meta

import registry
from bridge._conversion.matching import Comparison, same_shape
from bridge._conversion.neutral import Address, Path, nest, walk
from bridge._conversion.nnx_meta import NNXMeta
from bridge._flax.variables import assign_raw_value
from bridge._graphdefs.leaves import GraphDefLeaf, GraphDefLeaves
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._randomness.typed_keys import from_bits
from bridge._sharding.explicit_axes import any_explicit
from bridge._types import Shaped


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
        """Where a leaf is in the variables, or will be, with keys that fit those beside it.

        Integers come back as strings from a msgpack file.
        """
        if address in self._moved or address in self._given:
            return self._moved.get(address, address)
        collection, path = address
        own: Path = ()
        below = [given for other, given in self._given if other == collection]
        for key in path:
            beside = {given[len(own)] for given in below if len(given) > len(own)}
            is_text = any(isinstance(k, str) and k.isdecimal() for k in beside)
            own = (*own, str(key) if is_text and isinstance(key, int) else key)
            below = [given for given in below if given[: len(own)] == own]
        return collection, own

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
    value = bare = box.unbox() if is_constrained else _inside(box)
    # A restored checkpoint holds NumPy arrays and scalars, into which a Variable would write.
    # A pytree that has a dtype stays as it is, such as the quantized weights of a library.
    is_foreign = hasattr(value, "dtype") and not isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    is_foreign = is_foreign and jax.tree_util.all_leaves([value])
    if is_foreign and _is_wide(value, aval):
        # A write in place would go unnoticed, so it is refused.
        kept = copied = copy.copy(bare)
        if isinstance(kept, np.ndarray):
            copied.setflags(write=False)
        return copied
    numpy: Any = jax.numpy
    return numpy.asarray(bare) if is_foreign else bare


def _is_wide(value: Shaped, aval: object) -> bool:
    """Whether a value is of a dtype that JAX does not have, and was so when the module was made."""
    was = getattr(aval, "dtype", None)
    return value.dtype == was and jax.dtypes.canonicalize_dtype(was) != was


class _Anything:
    """Stands for a leaf whose shape is not known."""

    shape = ()
    dtype = "a leaf"


def _inside(leaf: object) -> Any:
    box = leaf
    if isinstance(leaf, jax.Array):
        return leaf
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
            below = {other: a for other, a in rest.items() if other[: len(text)] == text}
            held = {other[len(text) :]: leaves[a] for other, a in below.items()}
            value = _as_dict(slot, shapes, held)
            if value is not None:
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
