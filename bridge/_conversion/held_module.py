"""`HeldModule`: the Linen module of a ToNNX as a static attribute, compared by what it holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.core import Tracer

from bridge._errors import InvalidModuleError
from bridge._randomness.typed_keys import to_bits

_ARRAYS = (jax.Array, np.ndarray, np.generic)
# What is hashed of a module: equal fields of these types have equal hashes.
_HASHED = (bool, int, float, str, bytes, type, type(None))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeldModule:
    """A Linen module whose equality says whether the two are the same to a program.

    A Linen module compares its fields with `==`. For a field that is an array this is an array
    again, and it is true for 2 and 2.0 as well, which are not the same in a program.

    Attributes:
      module: the Linen module.
    """

    module: nn.Module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldModule) and _is_same(
            self.module, other.module, type(self.module).__name__
        )

    def __hash__(self) -> int:
        fields = [v for _, v in _fields(self.module) if isinstance(v, _HASHED)]
        return hash((type(self.module), *fields))

    def __repr__(self) -> str:
        return repr(self.module)


def _is_same(a: Any, b: Any, where: str) -> bool:
    """Whether two values are the same to a program.

    Raises:
      InvalidModuleError: the values cannot be compared.
    """
    if a is b:
        return True
    if isinstance(a, _ARRAYS) and isinstance(b, _ARRAYS):
        return _is_same_array(a, b, where)
    if type(a) is not type(b):
        return False
    parts, others = _parts(a), _parts(b)
    if parts is None or others is None:
        return _is_equal(a, b, where)
    return parts.keys() == others.keys() and all(
        _is_same(part, others[name], f"{where}{name}") for name, part in parts.items()
    )


def _parts(value: Any) -> dict[str, Any] | None:
    """What a value is made of, by how it is reached; None if JAX and Python do not say."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": item for i, item in enumerate(value)}
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{name}": item for name, item in _fields(value)}
    return None


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    names = (field.name for field in dataclasses.fields(value) if field.compare)
    return ((name, getattr(value, name, None)) for name in names if name != "parent")


def _is_same_array(a: Any, b: Any, where: str) -> bool:
    if (
        isinstance(a, Tracer)
        or isinstance(b, Tracer)
        or isinstance(a, jax.Array) is not (isinstance(b, jax.Array))
    ):
        return False
    if (a.shape, a.dtype) != (b.shape, b.dtype) or _is_weak(a) is not _is_weak(b):
        return False
    try:
        if a.dtype == np.dtype(object):
            return a.tolist() == b.tolist()
        return np.asarray(to_bits(a)).tobytes() == np.asarray(to_bits(b)).tobytes()
    except Exception as error:
        raise _incomparable(where, a) from error


def _is_weak(array: Any) -> bool:
    return getattr(array, "weak_type", False)


def _is_equal(a: Any, b: Any, where: str) -> bool:
    try:
        return bool(a == b)
    except Exception as error:
        raise _incomparable(where, a) from error


def _incomparable(where: str, value: Any) -> InvalidModuleError:
    return InvalidModuleError(
        f"the field {where} of a Linen module in a ToNNX",
        value,
        "a value that can be compared: two calls of nnx.jit share a program if their modules are"
        " equal",
        "give its class an __eq__ that returns a bool, or use the same object in both modules",
    )
