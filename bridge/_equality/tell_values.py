"""How arrays, containers and objects are told."""

from __future__ import annotations

import enum
import hashlib
import logging
import threading
import types
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from jax.core import Tracer

from bridge._flax.objects import DATA_ATTRIBUTES

from .classes import instance_parts
from .walk import OBJECT, ParentTellers, Tellers, Walk, identity

# Immutable, and compared by value.
_VALUES = (
    np.dtype,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.Device,
    jax.ShapeDtypeStruct,
)
_FROZEN = (tuple, str, bytes, int, float, complex, frozenset)
# A set may hold itself, by way of an object that is in it.
_DEEPEST_SET = 20
# Their contents do not matter.
_TOOLS = (logging.Logger, type(threading.Lock()), type(threading.RLock()))


def items(walk: Walk, value: Any) -> None:
    walk.header(type(value), len(value), holds=value)


def mapping(walk: Walk, value: Any) -> None:
    keys = list(value)
    if not walk.ordered and all(type(key) is str for key in keys):
        keys.sort()
    walk.header(type(value), len(keys), holds=keys)
    walk.pending += [value[key] for key in keys]


def set_(walk: Walk, value: Any) -> None:
    """The keys of a set's items, which have no order."""
    keys = []
    for item in value:
        inner = walk.inner(item) if walk.depth < _DEEPEST_SET else None
        if inner is None or not inner.is_complete:
            walk.unknown(value)
            return
        keys.append(tuple(inner.key))
    walk.header(type(value), frozenset(keys))


def float_(walk: Walk, value: Any) -> None:
    # As text, signed zeros differ and NaN equals itself.
    walk.header(float, value.hex())


def complex_(walk: Walk, value: Any) -> None:
    walk.header(complex, value.real.hex(), value.imag.hex())


def scalar(walk: Walk, value: np.generic) -> None:
    walk.header(type(value), value.dtype, value.tobytes())


def numpy_array(walk: Walk, value: np.ndarray) -> None:
    known = walk.known.get(id(value))
    if known is not None:
        walk.header(np.ndarray, known)
    elif value.dtype.hasobject:
        walk.header(np.ndarray, value.shape, value.dtype, holds=[value.tolist()])
    else:
        walk.mutable(value)
        walk.bytes_left -= value.nbytes
        if walk.bytes_left < 0:
            walk.itself(value)
        else:
            walk.header(np.ndarray, digest(value))


def jax_array(walk: Walk, value: Any) -> None:
    number = identity(value)
    if number is None or isinstance(value, Tracer | jax.Ref):
        walk.itself(value)
    elif walk.made and value.is_fully_addressable and not value.is_deleted():
        walk.bytes_left -= value.nbytes
        if walk.bytes_left < 0:
            walk.itself(value)
        else:
            walk.header(jax.Array, str(value.dtype), digest(_numbers(value)))
    else:
        walk.header(jax.Array, number)


def _numbers(array: jax.Array) -> np.ndarray:
    if not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(array)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(array))


def enum_(walk: Walk, value: enum.Enum) -> None:
    walk.header(enum.Enum, value.name, holds=[type(value), value.value])


def by_value(walk: Walk, value: Any) -> None:
    walk.header(type(value), value)


def tool(walk: Walk, value: Any) -> None:
    walk.header(type(value), walk.number(value))


def linen_module(walk: Walk, value: nn.Module) -> None:
    if value.scope is not None:
        walk.unknown(value)
        return
    # Its internal state has a number that differs for every module.
    fields = [f for f in value.__dataclass_fields__ if f != "parent"]
    held = {name: getattr(value, name, None) for name in fields}
    walk.header(nn.Module, tuple(held), holds=[type(value), *held.values()])


def variable(walk: Walk, value: nnx.Variable[Any]) -> None:
    if value.ref or value.hijax:
        walk.unknown(value)
        return
    holds = [value.var_type, value.get_raw_value(), value.get_metadata()]
    walk.mutable(value)
    walk.header(nnx.Variable, holds=holds)


def object_(walk: Walk, value: Any) -> None:
    parts = instance_parts(value)
    if parts is None:
        walk.unknown(value)
        return
    base, attributes = parts
    options = getattr(type(value), "__dataclass_params__", None)
    is_frozen = options.frozen if options else type(base) in _FROZEN and not attributes
    if not is_frozen:
        walk.mutable(value)
    walk.header(OBJECT, tuple(attributes))
    walk.pending += (type(value), base, *attributes.values())


def tree_definition(walk: Walk, value: Any) -> None:
    holds = [value.node_data(), value.children()]
    walk.header(type(value), value.num_nodes, value.num_leaves, holds=holds)


def ufunc(walk: Walk, value: np.ufunc) -> None:
    if getattr(np, value.__name__, None) is value:
        walk.header(np.ufunc, value)
    else:
        walk.unknown(value)


def digest(array: np.ndarray) -> tuple[Any, ...]:
    """A key of an array's shape, dtype and bytes."""
    has_bytes = array.ndim > 0 and array.size > 0
    # Without a copy if it lies in memory in order.
    data: Any = np.ascontiguousarray(array).view(np.uint8) if has_bytes else array.tobytes()
    hashed = hashlib.blake2b(data, digest_size=32)
    return array.shape, array.dtype, hashed.digest()


# Keyed by the exact type.
BY_TYPE: Tellers = {
    float: float_,
    complex: complex_,
    list: items,
    dict: mapping,
    FrozenDict: mapping,
    DATA_ATTRIBUTES: mapping,
    types.MappingProxyType: mapping,
    set: set_,
    frozenset: set_,
    np.ndarray: numpy_array,
    np.ufunc: ufunc,
    jax.tree_util.PyTreeDef: tree_definition,
}
# Keyed by a base type; the first match counts.
BY_PARENT: ParentTellers = [
    (enum.Enum, enum_),
    (np.generic, scalar),
    (jax.Array | jax.Ref, jax_array),
    (_VALUES, by_value),
    (_TOOLS, tool),
    (nn.Module, linen_module),
    (nnx.Variable, variable),
    (object, object_),
]
