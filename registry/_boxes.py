"""Converts a metadata box to (value, fields) and back.

A box is an instance of Linen's `AxisMetadata`. On the NNX side the value lives in a Variable and
the fields in that Variable's metadata, so the fields of Linen's own boxes carry the names that NNX
gives the same facts: ``names`` is ``out_sharding`` there, and ``rules`` is ``sharding_rules``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flax.core import meta

from ._errors import InvalidRegistrationError, UnsupportedBoxError, describe

Fields: TypeAlias = Mapping[str, Any]

# A Variable keeps these under their own names, whatever its metadata says.
RESERVED_FIELDS = frozenset({"hijax", "ref", "eager_sharding", "value"})
_NNX_NAMES = {"names": "out_sharding", "rules": "sharding_rules"}


@dataclasses.dataclass(frozen=True)
class BoxCodec:
    """Takes boxes of one type apart and puts them together again.

    Attributes:
      to_fields: box -> (value, fields); it must leave the box as it was.
      from_fields: (value, fields) -> an equal box.
      names: the fields that `from_fields` keeps, None if it keeps any.
    """

    to_fields: Callable[[Any], tuple[Any, Fields]]
    from_fields: Callable[[Any, Fields], Any]
    names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for function in (self.to_fields, self.from_fields):
            if not callable(function):
                raise InvalidRegistrationError(function, "a function")


@functools.lru_cache(maxsize=256)
def derive_codec(box_type: type) -> BoxCodec:
    """The codec of a box type that nobody registered.

    It calls the type's own `to_nnx_metadata` and `from_nnx_metadata` if it defines them, and else
    copies its dataclass fields. Raises UnsupportedBoxError if the type offers neither, or no field
    is clearly the value.
    """
    kind: Any = box_type
    if issubclass(kind, meta.Partitioned):
        # Not Flax's own pair of methods: LogicallyPartitioned's empties the box that it reads.
        return _dataclass_codec(box_type, _NNX_NAMES)
    if hasattr(kind, "to_nnx_metadata") and hasattr(kind, "from_nnx_metadata"):
        return _protocol_codec(box_type)
    if dataclasses.is_dataclass(kind):
        return _dataclass_codec(box_type, {})
    raise UnsupportedBoxError(box_type, "it is not a dataclass")


def _protocol_codec(box_type: type[Any]) -> BoxCodec:
    def to_fields(box: Any) -> tuple[Any, Fields]:
        fields = dict(copy.copy(box).to_nnx_metadata())
        if "value" not in fields:
            return box.unbox(), fields
        return fields.pop("value"), fields

    def from_fields(value: object, fields: Fields) -> Any:
        return box_type.from_nnx_metadata({"value": value, **fields})

    return BoxCodec(to_fields, from_fields)


def _dataclass_codec(box_type: type[Any], renames: Mapping[str, str]) -> BoxCodec:
    fields = dataclasses.fields(box_type)
    value_name = _value_field(box_type, fields)
    names = {f.name: renames.get(f.name, f.name) for f in fields if f.name != value_name}
    reserved = sorted(RESERVED_FIELDS.intersection(names.values()))
    if reserved:
        raise UnsupportedBoxError(
            box_type, f"its fields {reserved} mean something else on a Variable"
        )
    arguments = list(inspect.signature(box_type).parameters)
    if sorted(arguments) != sorted(f.name for f in fields):
        raise UnsupportedBoxError(box_type, f"its constructor takes {arguments}, not its fields")

    def to_fields(box: object) -> tuple[Any, Fields]:
        return getattr(box, value_name), {nnx: getattr(box, own) for own, nnx in names.items()}

    def from_fields(value: object, found: Fields) -> Any:
        kept = {own: found[nnx] for own, nnx in names.items() if nnx in found}
        return box_type(**{value_name: value}, **kept)

    return BoxCodec(to_fields, from_fields, frozenset(names.values()))


def _value_field(box_type: type, fields: tuple[dataclasses.Field[Any], ...]) -> str:
    """The field that `unbox` returns: `value`, or the only one that may hold arrays."""
    names = [f.name for f in fields]
    if "value" in names:
        return "value"
    # flax.struct marks fields that hold no arrays.
    in_tree = [f.name for f in fields if f.metadata.get("pytree_node", True)]
    if len(in_tree) == 1:
        return in_tree[0]
    raise UnsupportedBoxError(
        box_type,
        f"no field of {describe(box_type)} is called value, and of its fields {names} {in_tree}"
        " could be it",
    )
