"""Writes moved values into an NNX model, or makes Linen variables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.core import Tracer

from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Neutral
from bridge._conversion.own_leaves import with_static
from bridge._errors import PortError
from bridge._flax.variables import assign_raw_value, raw_value

from . import _moving
from ._correspondence import Correspondence
from ._trees import linen_text, nnx_text


def write_nnx(found: Correspondence) -> None:
    """Writes the Linen values into the NNX model: all of them, or none if anything raises.

    Raises PortError if the Linen side holds no values.
    """
    sources = found.linen_values
    _require_values({linen_text(address): value for address, value in sources.items()})
    leaves = found.nnx_leaves
    moved = _moving.to_nnx(found, sources)
    # Everything that can fail for its size or its type fails before the first write.
    values = {path: like(value, leaves[path].value) for path, value in moved.items()}
    variables = {path: leaves[path].item for path in values if leaves[path].is_variable}
    write([(variable, values[path]) for path, variable in variables.items()])
    for path, value in values.items():
        if path not in variables:
            holder = found.nnx.at(path[:-1])
            _set(holder.item if holder else None, path[-1], value)
            leaves[path].item = value


def like(value: Any, place: Any) -> Any:
    """A value in the dtype and the sharding of what it replaces.

    A host array goes to its shards at once: no device needs room for all of it.
    """
    if not hasattr(place, "dtype"):
        return value
    if value.dtype != place.dtype:
        value = value.astype(place.dtype)
    sharding = getattr(place, "sharding", None)
    if isinstance(value, Tracer) or isinstance(place, Tracer) or sharding is None:
        return jnp.asarray(value)
    if isinstance(place, jax.Array) and not place.committed:
        return jnp.asarray(value)
    return jax.device_put(value, sharding)


def write(values: Sequence[tuple[nnx.Variable[Any], Any]]) -> None:
    """Puts values into Variables: all of them, or none if anything raises."""
    before: list[tuple[nnx.Variable[Any], Any]] = []
    try:
        for variable, value in values:
            before.append((variable, raw_value(variable)))
            assign_raw_value(variable, value)
    except BaseException:
        for variable, value in before:
            assign_raw_value(variable, value)
        raise


def linen_variables(found: Correspondence, target: Mapping[str, Any]) -> Any:
    """Linen variables like `target` with the NNX values.

    What has no counterpart, RNG state for one, is the target's own; where that is abstract, it is
    left out. Raises PortError if the NNX side holds no values.
    """
    sources = {path: node.value for path, node in found.nnx_leaves.items()}
    _require_values({nnx_text(path): value for path, value in sources.items()})
    moved = _moving.to_linen(found, sources)
    filled: Neutral = {}
    for address, leaf in linen_leaves.from_variables(target).items():
        if address in moved:
            filled[address] = leaf._replace(value=like(moved[address], leaf.value))
        elif leaf.is_empty or not _is_abstract(leaf.value):
            filled[address] = leaf
    result = with_static(linen_leaves.to_variables(filled), target)
    return freeze(result) if isinstance(target, FrozenDict) else result


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict | list):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _is_abstract(value: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def _require_values(sources: Mapping[str, Any]) -> None:
    abstract = [path for path, value in sources.items() if _is_abstract(value)]
    if abstract:
        raise PortError("the source has shapes and no values", abstract)
