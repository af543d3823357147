"""Translates the constructor of each of Flax's own layers, and its call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._layers.layer import LayerRow as Row
from bridge._layers.layer import Seen, SizeOf
from bridge._layers.table import layer_of_linen
from bridge._train_eval import MODE_FIELDS
from bridge.rewrite.observe._records import Instance, Shape

# NNX's names of what calls take, by Linen's.
CALL_RENAMES = {"rng": "rngs", "inputs_kv": "inputs_k"}
_MANY = 99
# NNX gives the function a tuple of the arrays, and Linen each by itself.
_OTHER_FIELDS = ("promote_dtype",)


class Layer:
    """The NNX counterpart of a Linen class: its row, and what the signatures of both tell.

    Attributes:
        native: the NNX class.
        name: its name.
        sizes: what its constructor needs besides the fields; see `bridge._layers`.
        renames: NNX names by Linen field names.
        positional: the NNX names that may be given by position.
        modes: the Linen fields that NNX takes in the call as well.
        extra: arguments that are always given, unless the program gives them.
        call: names of the positional arguments of Linen's call.
        keep: how many of these are positional in NNX too, no fewer than there are if all are.
        unsupported: Linen fields that have no place in NNX.
        dropped: Linen fields that the sizes tell.
        needed: Linen fields without which there is no NNX layer.
        optional: sizes that a layer may not have.
        rngs: whether the constructor takes `rngs`.
        carried: Linen fields that the variables know better.
        has_parts: whether it is given other layers.
        call_renames: NNX names of what its call takes by keyword, by Linen's.
    """

    def __init__(self, cls: type[Any], row: Row, native: type[Any]) -> None:
        self._cls, self.native, self.name = cls, native, native.__name__
        self.sizes: Mapping[str, SizeOf] = row.sizes
        self.carried: Mapping[str, SizeOf] = row.carried
        self.renames, self.extra = row.fields, row.defaults
        self.dropped, self.has_parts = row.sized, row.has_parts
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in ("parent", "name")}
        self._taken = _arguments(native.__init__)
        takes_all = any(each.kind is each.VAR_POSITIONAL for each in self._taken.values())
        self.unsupported = tuple(
            name
            for name in (() if takes_all else fields)
            if name in (*row.other_fields, *_OTHER_FIELDS)
            or (self._new(name) not in self._taken and name not in self.dropped)
        )
        self.modes = tuple(name for name in fields if name in MODE_FIELDS)
        self.positional = _positional(self._taken)
        self.rngs = "rngs" in self._taken
        required = {n for n, each in self._taken.items() if each.default is each.empty}
        self.needed = tuple(
            name
            for name, field in fields.items()
            if self._new(name) in required and field.default is not dataclasses.MISSING
        )
        self.optional = tuple(name for name in self.sizes if name not in required)
        self.call, self.keep = self._calls()

    def _new(self, field: str) -> str:
        return self.renames.get(field, field)

    def _calls(self) -> tuple[tuple[str, ...], int]:
        old, new = _arguments(self._cls.__call__), _arguments(self.native.__call__)
        self.call_renames = {
            name: other
            for name, other in CALL_RENAMES.items()
            if name in old and name not in new and other in new
        }
        given = _positional(old)
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1] and pair[0] not in self.modes,
            zip(given, _positional(new), strict=False),
        )
        keep = len([*same])
        if keep == len(given):
            return (), _MANY
        known = itertools.takewhile(lambda name: CALL_RENAMES.get(name, name) in new, given)
        return tuple(known), keep

    def refuses_none(self, cls: type, field: str) -> bool:
        """Whether None is the default of a Linen field, and NNX has another one."""
        given = self._taken.get(self._new(field))
        own = [f.default for f in dataclasses.fields(cls) if f.name == field]  # pyright: ignore
        nothing = (None, inspect.Parameter.empty)
        return own == [None] and given is not None and given.default not in nothing


def _arguments(function: Any) -> Mapping[str, inspect.Parameter]:
    own = dict(inspect.signature(function).parameters)
    own.pop("self")
    return own


def _positional(arguments: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in arguments.items() if each.kind in kinds)


def layer_of(cls: type | None) -> Layer | None:
    """The counterpart of a class, None unless it is a Flax layer that is rewritten."""
    row = layer_of_linen(cls) if cls is not None and cls.__module__.startswith(_LINEN) else None
    # What a row has no place for, and names that only the layer around knows, stay Linen.
    if cls is None or row is None or row.zero or row.kept_by_path is not None:
        return None
    # The new text names the class as one of `nnx`.
    if row.nnx is None or getattr(nnx, row.nnx.__name__, None) is not row.nnx:
        return None
    return _layer(cls, row, row.nnx)


_LINEN = f"{nn.__name__}."
_layer = functools.cache(Layer)


def seen(instance: Instance, variables: Any) -> Seen:
    """What the sizes of a layer are found in.

    `variables` are abstract, by collection.
    """
    values = (v for call in instance.calls for v in (*call.args, *call.kwargs.values()))
    first = next((value.shape for value in values if isinstance(value, Shape)), None)
    return Seen(instance.fields, first, variables)


def field_order(cls: type) -> list[str]:
    """The names of the fields of a Linen class, as its constructor takes them by position."""
    return [
        field.name
        for field in dataclasses.fields(cls)  # pyright: ignore
        if field.init and not field.kw_only
    ]


def layer_base(cls: type, own: Any) -> type | None:
    """The layer of Flax that a class of the package derives from, if it can be NNX's.

    `own` has the classes of the package.
    """
    foreign = [b for b in cls.__mro__[1:] if issubclass(b, nn.Module) and b not in own]
    base = foreign[0]
    layer = layer_of(base)
    is_plain = layer is not None and not (layer.has_parts or issubclass(base, nn.RNNCellBase))
    return base if is_plain else None


def ordered(layer: Layer, given: Mapping[str, str], positional: Iterable[str]) -> str:
    """The arguments as text, by position as far as they were and NNX takes them so."""
    by_position, rest = set(positional), dict(given)
    parts = []
    for name in layer.positional:
        if name not in rest or name not in by_position:
            break
        parts.append(rest.pop(name))
    first = [name for name in layer.positional if name in rest]
    others = [name for name in rest if name not in first and name != "rngs"]
    tail = ["rngs"] if "rngs" in rest else []
    return ", ".join([*parts, *(f"{name}={rest[name]}" for name in (*first, *others, *tail))])


def has_next(layer: Layer, name: str, positional: Iterable[str]) -> bool:
    """Whether the argument behind one is given by position."""
    place = layer.positional.index(name) + 1 if name in layer.positional else 0
    return bool(place) and bool({*layer.positional[place : place + 1]} & {*positional})
