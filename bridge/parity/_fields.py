"""The static fields of layers, under one name on both sides: what differs though no value does."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from bridge._layers.table import known_base, layer_of_nnx
from bridge._train_eval import MODE_FIELDS

# A check sets the modes itself, and the others are not fields of the computation.
_LEFT_OUT = frozenset({*MODE_FIELDS, "parent", "name", "rngs"})
# One side derives these from the inputs, the other takes them as fields.
_DERIVED = frozenset(
    {"features", "in_features", "out_features", "qkv_features", "num_groups", "group_size"}
)
# JAX takes these in any case, and also as members of an enumeration.
_NAMES_IN_ANY_CASE = frozenset({"padding", "precision"})
_RATES = ("rate", "dropout_rate")
_SKIP = object()


@dataclasses.dataclass(frozen=True)
class FieldDifference:
    """A field that differs between a layer and its counterpart.

    Attributes:
      name: Linen's name of it, or `class`.
      a: the value in `a`, as text.
      b: the value in `b`, as text.
    """

    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.name} is {self.a} in a and {self.b} in b"


def fields_of(module: nn.Module | nnx.Module) -> dict[str, Any]:
    """The static fields of a module by Linen's names, each in a form that compares.

    Arrays, Variables, modules, initialisers and functions without a name of their own are left out.
    """
    if isinstance(module, nn.Module):
        own = {f.name: getattr(module, f.name, None) for f in dataclasses.fields(module)}
        names: Mapping[str, str] = {}
    else:
        own, layer = vars(module), layer_of_nnx(type(module))
        names = layer.linen_of_field if layer is not None else {}
    plain = {
        names.get(name, name): _plain(name, value)
        for name, value in own.items()
        if name not in _LEFT_OUT and not name.startswith("_") and not name.endswith("_init")
    }
    return {name: value for name, value in plain.items() if value is not _SKIP}


def dropout_rate(fields: Mapping[str, Any]) -> tuple[str, float]:
    """The name and the value of a layer's dropout rate, 0 if it has none."""
    for name in _RATES:
        rate = fields.get(name)
        if isinstance(rate, int | float) and rate > 0:
            return name, rate
    return "", 0.0


def field_differences(
    classes: tuple[type[Any], type[Any]],
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    same_dtypes: bool,
) -> Iterator[FieldDifference]:
    """The fields that both layers have and that are not the same.

    `a` and `b` are what `fields_of` returns for the two layers. With `same_dtypes`, the outputs
    have the same dtypes, and a dtype that only one side has given makes no difference.
    """
    if not _are_counterparts(*classes):
        yield FieldDifference("class", *(cls.__name__ for cls in classes))
    for name in a:
        if name in b and not _same(name, a[name], b[name], same_dtypes):
            yield FieldDifference(name, _text(a[name]), _text(b[name]))


def _same(name: str, x: Any, y: Any, same_dtypes: bool) -> bool:
    if x == y or (name in _NAMES_IN_ANY_CASE and str(x).casefold() == str(y).casefold()):
        return True
    if x is None or y is None:
        if name in _DERIVED or (same_dtypes and "dtype" in name):
            return True
        # "Off" is None on one side and False on the other; functions have defaults.
        return (x or None) == (y or None) or any(isinstance(v, _Function) for v in (x, y))
    if name == "features" and np.prod(x) == np.prod(y):
        # A `DenseGeneral` whose features are several axes, and a `Linear`.
        return True
    if isinstance(x, tuple) and not isinstance(y, tuple):
        return len(x) > 0 and all(_same(name, item, y, same_dtypes) for item in x)
    if isinstance(y, tuple) and not isinstance(x, tuple):
        return _same(name, y, x, same_dtypes)
    return False


@dataclasses.dataclass(frozen=True)
class _Function:
    name: str


def _plain(name: str, value: Any) -> Any:
    """A value in a form that compares, `_SKIP` for what does not."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        items = [_plain(name, item) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else tuple(items)
    if isinstance(value, Mapping):
        items = {str(key): _plain(name, item) for key, item in value.items()}
        kept = tuple(sorted((k, v) for k, v in items.items() if v is not _SKIP))
        return kept if len(kept) == len(items) else _SKIP
    if "dtype" in name:
        with contextlib.suppress(TypeError):
            return jnp.dtype(value).name
    function = getattr(value, "__name__", "<")
    is_class = isinstance(value, type | nn.Module | nnx.Pytree)
    if callable(value) and not is_class and "<" not in function:
        return _Function(function)
    return _SKIP


def _text(value: Any) -> str:
    if isinstance(value, _Function):
        return value.name
    text = repr(value) if not isinstance(value, np.generic) else str(value)
    return text if len(text) < 60 else text[:59] + "…"


def _are_counterparts(a: type[Any], b: type[Any]) -> bool:
    """Whether two classes may stand for each other; one that nothing is known of may for any."""
    x, y = known_base(a), known_base(b)
    if x is None or y is None or x.__name__ == y.__name__:
        return True
    if issubclass(x, nn.Module) and issubclass(y, nn.Module):
        return False
    linen, native = (x, y) if issubclass(x, nn.Module) else (y, x)
    layer = layer_of_nnx(native)
    return layer is not None and linen.__name__ in layer.linen_names
