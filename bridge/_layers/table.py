"""Finds the row of a layer, and takes rows for users' own layers."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Collection, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._errors import LayerRegistrationError

from .flax_layers import ROWS
from .layer import LayerRow

_AUTOMATIC = re.compile(r"([A-Za-z]\w*)_\d+")
_FLAX = ("flax.linen.", "flax.nnx.nn.")
_WITHOUT_NNX = tuple(row for row in ROWS if row.nnx is None)
# The names of leaves in Flax's layers that are the same on both sides.
LEAF_NAMES = frozenset(own for row in ROWS for linen, own in row.leaves.items() if linen == own)

_lock = threading.Lock()
_by_linen: dict[type[Any], LayerRow] = {}
_by_nnx: dict[type[Any], LayerRow] = {}
_linen_names: set[str] = set()


def register_layer(
    linen_class: type[nn.Module],
    nnx_class: type[nnx.Module],
    *,
    leaves: Mapping[str | tuple[str, ...], str] | None = None,
    fields: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Makes a layer of your own known to the tools: `port`, `parity` and `python -m bridge report`.

    Values are then ported by the names that are given here, fields are compared under both names,
    and the report counts the Linen class as one with a counterpart. Subclasses of the NNX class
    count as the same layer, like subclasses of Flax's own layers. You may register the same layer
    again, and run a notebook cell again that defines its classes.

    Args:
      linen_class: the Linen class.
      nnx_class: its counterpart. It may be a class of Flax, such as `nnx.Linear`.
      leaves: NNX's paths below the layer by Linen's, with `/`, of the leaves and submodules that
        have other names. A tuple of Linen paths means that NNX keeps these leaves as one, side by
        side on its last axis: `{('q/kernel', 'k/kernel'): 'qk/kernel'}`.
      fields: NNX's names of the fields by Linen's, where they differ.
      overwrite: whether to replace an earlier registration of either class.

    Raises:
      LayerRegistrationError: one of the two is not a module class of its kind, `fields` names no
        field of the Linen class, or one of the classes already has another counterpart or
        other names and `overwrite` is false.

    Example::

      >>> import bridge, jax, jax.numpy as jnp
      >>> from bridge import port
      >>> from flax import linen as nn, nnx
      >>> class LinenScale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param('gain', nn.initializers.ones, (x.shape[-1],))
      >>> class Scale(nnx.Module):
      ...     def __init__(self, size):
      ...         self.scale = nnx.Param(jnp.zeros(size))
      ...     def __call__(self, x):
      ...         return x * self.scale
      >>> bridge.register_layer(LinenScale, Scale, leaves={'gain': 'scale'})
      >>> model = Scale(3)
      >>> _ = port.plan(LinenScale().init(jax.random.key(0), jnp.ones(3)), model).apply()
      >>> model.scale[...].tolist()
      [1.0, 1.0, 1.0]
    """
    _check(linen_class, nnx_class, fields or {})
    with _lock:
        known, taken = _by_nnx.get(nnx_class), _by_linen.get(linen_class)
        row = LayerRow(
            nnx_class, (linen_class,), leaves=dict(leaves or {}), fields=dict(fields or {})
        )
        if known is not None and _agrees(known, leaves, fields):
            others = (cls for cls in known.linen if not _is_same(cls, linen_class))
            row = dataclasses.replace(known, linen=(*others, linen_class))
        elif known is not None and not overwrite:
            raise _conflict(linen_class, nnx_class, nnx_class, known)
        if taken is not None and taken.nnx is not None and taken.nnx is not nnx_class:
            if not overwrite and not _is_same(taken.nnx, nnx_class):
                raise _conflict(linen_class, nnx_class, linen_class, taken)
            _add(dataclasses.replace(taken, linen=tuple({*taken.linen} - {linen_class})))
        for cls in known.linen if known is not None else ():
            _by_linen.pop(cls, None)
        _add(row)


def _add(row: LayerRow) -> None:
    _by_linen.update(dict.fromkeys(row.linen, row))
    if row.nnx is not None:
        _by_nnx[row.nnx] = row
        _linen_names.update(row.linen_names)


def _check(linen_class: Any, nnx_class: Any, fields: Mapping[str, str]) -> None:
    given = ((linen_class, nn.Module, "a Linen class"), (nnx_class, nnx.Module, "an NNX class"))
    for cls, base, expected in given:
        if not (isinstance(cls, type) and issubclass(cls, base)) or cls is base:
            problem = f"expected {expected}, found {cls!r}"
            raise LayerRegistrationError(linen_class, nnx_class, cls, problem)
    own = {field.name for field in dataclasses.fields(linen_class)}
    if unknown := sorted(fields.keys() - own):
        problem = f"{linen_class.__name__} has no field {', '.join(unknown)}"
        remedy = f"Its fields are {', '.join(sorted(own - {'name', 'parent'})) or 'none'}"
        raise LayerRegistrationError(linen_class, nnx_class, tuple(unknown), problem, remedy)


def _agrees(
    row: LayerRow, leaves: Mapping[Any, str] | None, fields: Mapping[str, str] | None
) -> bool:
    """Whether names say what a row says; those that are not given say nothing else."""
    return all(
        given is None or _other_names(given) == _other_names(known)
        for given, known in ((leaves, row.leaves), (fields, row.fields))
    )


def _other_names(names: Mapping[Any, str]) -> dict[Any, str]:
    return {linen: own for linen, own in names.items() if linen != own}


def _is_same(a: type[Any], b: type[Any]) -> bool:
    """Whether two classes are one that was perhaps defined again, as in a notebook."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def _conflict(
    linen_class: type[Any], nnx_class: type[Any], taken: type[Any], row: LayerRow
) -> LayerRegistrationError:
    linen = ", ".join(map(_text, row.linen)) or "no Linen class"
    pair = f"{linen} and {row.nnx and _text(row.nnx)}"
    names = "".join(
        f", with {what} {dict(names)}"
        for what, names in (("leaves", _other_names(row.leaves)), ("fields", row.fields))
        if names
    )
    problem = f"{_text(taken)} is already in the layer of {pair}{names}"
    remedy = "Pass overwrite=True to replace that"
    return LayerRegistrationError(linen_class, nnx_class, row, problem, remedy)


def layer_of_linen(cls: type[Any] | None) -> LayerRow | None:
    """The row of a Linen class itself."""
    return None if cls is None else _by_linen.get(cls)


def layer_of_nnx(cls: type[Any] | None) -> LayerRow | None:
    """The row of an NNX class, or of the nearest class with a row that it derives from."""
    for base in cls.__mro__ if cls is not None else ():
        if base in _by_nnx:
            return _by_nnx[base]
    return None


def known_base(cls: type[Any]) -> type[Any] | None:
    """The nearest layer of Flax, or with a row, that a class is or derives from."""
    for base in cls.__mro__:
        if base in _by_linen or base in _by_nnx:
            return base
        if base.__module__.startswith(_FLAX):
            return None if base in (nn.Module, nnx.Module) else base
    return None


def is_linen_layer(name: str) -> bool:
    """Whether the leaves of a Linen class of this name can be those of an NNX class."""
    return name in _linen_names


def without_nnx_class(
    collection: str, path: tuple[str, ...], siblings: Collection[str]
) -> str | None:
    """The Linen class that a leaf belongs to, if it is one without an NNX class.

    `siblings` are the names beside the leaf's module, which tell some classes whatever their name
    is.
    """
    for row in _WITHOUT_NNX:
        names = row.linen_names - _linen_names
        told = [match.group(1) for match in map(_AUTOMATIC.fullmatch, map(str, path)) if match]
        if found := next((name for name in told if name in names), None):
            return found
        if names and row.parts and row.parts == {*siblings}:
            return row.name
        if row.collection == collection:
            return "Fp8"
    return None


def _text(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


for _row in ROWS:
    _add(_row)
