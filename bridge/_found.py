"""Which Linen variables belong to which leaf of a GraphDef."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta

import registry

from ._arrays import is_jax_array
from ._flax_internals import assign_raw_value
from ._graphdef import StaticGraphDef
from ._matching import FITS, Comparison, compare
from ._mesh_axes import any_explicit
from ._meta import NNXMeta
from ._neutral import Address


@dataclasses.dataclass(frozen=True)
class Found:
    """The Linen variables of one scope, by address.

    Attributes:
      leaves: the leaves as they are, boxes included, by the address that the module knows them by.
      keys: where a leaf really is, if not at its address: integers come back as strings from a
        msgpack file.
    """

    leaves: Mapping[Address, Any]
    keys: Mapping[Address, Address]

    @classmethod
    def of(cls, leaves: Mapping[Address, Any], graphdef: StaticGraphDef) -> Found:
        """Matches leaves to the GraphDef's slots, by path or by the text of the path."""
        wanted = graphdef.addresses
        if wanted.issuperset(leaves):
            return cls(leaves, {})
        by_text = {_text(address): address for address in wanted if address not in leaves}
        known = {a: by_text[_text(a)] for a in leaves if a not in wanted and _text(a) in by_text}
        matched = {known.get(address, address): leaf for address, leaf in leaves.items()}
        return cls(matched, {address: found for found, address in known.items()})


def comparison(graphdef: StaticGraphDef, found: Found, *, rng: bool = False) -> Comparison:
    """What a GraphDef needs against what was found.

    Args:
      graphdef: the definition.
      found: the variables.
      rng: whether RNG state has to be there.

    Returns:
      The comparison. Only parameters and batch statistics are held to their shapes; a cache may
      grow.
    """
    if _fits_at_once(graphdef, found):
        return FITS
    expected: dict[Address, Any] = {}
    leaves = {address: _inside(leaf) for address, leaf in found.leaves.items()}
    for slot, aval in zip(graphdef.slots, slot_avals(graphdef), strict=True):
        if slot.is_rng and not rng:
            leaves.pop(slot.address, None)
        elif aval is None or (slot.address in leaves and not slot.has_fixed_shape):
            expected[slot.address] = leaves.get(slot.address, _Anything())
        else:
            expected[slot.address] = aval
    return compare(expected, leaves)


def _fits_at_once(graphdef: StaticGraphDef, found: Found) -> bool:
    """Whether every leaf is a bare array of the right shape, and there is no other.

    That is so at almost every call, and takes a fraction of what comparing takes.
    """
    leaves = found.leaves
    if graphdef.avals is None or len(leaves) != len(graphdef.slots):
        return False
    for slot, aval in zip(graphdef.slots, graphdef.avals, strict=True):
        leaf = leaves.get(slot.address)
        if not is_jax_array(leaf) or leaf.shape != getattr(aval, "shape", None):
            return False
    return True


def overlay(module_leaves: list[Any], graphdef: StaticGraphDef, found: Found) -> None:
    """Puts the values that exist into a module that was just constructed."""
    for leaf, slot in zip(module_leaves, graphdef.slots, strict=True):
        if slot.address in found.leaves and isinstance(leaf, nnx.Variable):
            assign_raw_value(leaf, unboxed(found.leaves[slot.address]))


def slot_avals(graphdef: StaticGraphDef) -> tuple[Any, ...]:
    """Shape and dtype of every slot, None where they are not known."""
    return graphdef.avals or (None,) * len(graphdef.slots)


def unboxed(leaf: Any) -> Any:
    """The value of a leaf as a Variable can hold it."""
    if is_jax_array(leaf):
        return leaf
    # A box of Linen's constrains what it gives out, which JAX refuses for Explicit axes.
    is_constrained = isinstance(leaf, meta.AxisMetadata) and not any_explicit()
    value = leaf.unbox() if is_constrained else _inside(leaf)
    # A restored checkpoint holds NumPy arrays and scalars, into which a Variable would write.
    is_foreign = hasattr(value, "dtype") and not isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    return jax.numpy.asarray(value) if is_foreign else value


class _Anything:
    """Stands for a leaf whose shape is not known."""

    shape = ()
    dtype = "a leaf"


def _inside(leaf: Any) -> Any:
    if is_jax_array(leaf):
        return leaf
    # unbox may put a sharding constraint on the value, which is an equation in the program.
    if isinstance(leaf, NNXMeta | meta.Partitioned):
        return leaf.value
    if isinstance(leaf, meta.AxisMetadata):
        return registry.current().codec_for(type(leaf)).to_fields(leaf)[0]
    return leaf


def _text(address: Address) -> tuple[str, ...]:
    return address[0], *map(str, address[1])
