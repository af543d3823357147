"""The record that a checkpoint has of each leaf, readable without any array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

# Orbax's own dependency, which writes its arrays.
import tensorstore
from flax import nnx
from jax.core import Tracer

import registry
from bridge._conversion.neutral import Leaf, Path
from bridge._errors import path_text
from bridge._randomness.typed_keys import implementation, is_key, to_bits
from bridge._rules.pieces import Piece

from . import _json
from ._json import NotCarriedError

Names: TypeAlias = tuple[str, ...]
Location: TypeAlias = tuple[Any, ...]

# How many bytes are read at once, or are made of other arrays.
_BATCH = 2**28
PYTHON_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array or scalar in a checkpoint.

    Attributes:
      kind: `jax`, `numpy`, `generic` (a NumPy scalar), `key` (typed PRNG keys), or a Python type.
      shape: its shape; that of the keys, not of their data.
      dtype: its dtype as text.
      content: a Python scalar itself, None if it is among the arrays; the implementation of keys.
      location: its keys in the tree of arrays.
      digest: the digest of its array, None if the checkpoint has none.
      tree: the name of that tree.
      recipe: how it is made of arrays of the checkpoint, None if it is one of them.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    content: Any = None
    location: Location = ()
    digest: str | None = None
    tree: str = ""
    recipe: Recipe | None = dataclasses.field(default=None, compare=False)

    @property
    def is_python(self) -> bool:
        """Whether this is a Python scalar or a string."""
        return self.kind in PYTHON_TYPES

    @property
    def is_read(self) -> bool:
        """Whether its value is among the arrays: orbax refuses arrays without elements."""
        return self.content is None if self.kind in PYTHON_TYPES else 0 not in self.shape

    @property
    def nbytes(self) -> int:
        """How many bytes it takes at most; nothing for a Python scalar."""
        if self.kind in PYTHON_TYPES:
            return 0
        # Keys have words of their own; no PRNG has more than four.
        width = 16 if self.kind == "key" else jax.numpy.dtype(self.dtype).itemsize
        return math.prod(self.shape) * width


class Recipe(NamedTuple):
    """How one array is made of others, the `origins`; with `to_nnx`, these are Linen's.

    Each has the piece that says which part of it becomes which part of the array.
    """

    origins: tuple[Stored, ...]
    pieces: tuple[Piece, ...]
    to_nnx: bool


@dataclasses.dataclass(frozen=True)
class Record:
    """A leaf of a checkpoint.

    Attributes:
      path: its keys; the first one is the collection, if the tree has collections.
      stored: the arrays and scalars of its value, by their names in the tree of arrays.
      form: the containers of its value, as `_json.encode_form` gives them.
      box: the name of its box type.
      fields: the fields of its box, as JSON.
      left_out: the fields that JSON cannot hold.
    """

    path: Path
    stored: Mapping[Names, Stored]
    form: Any
    box: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def var_type(self) -> type[nnx.Variable[Any]]:
        """The Variable type of its collection."""
        return registry.current().type_from_name(self.path[0])

    def leaf(self, values: Mapping[Names, Any]) -> Leaf:
        """The leaf with its box.

        Raises NotCarriedError if the box or the value holds what only a program can.
        """
        if self.left_out:
            raise NotCarriedError(
                f"its box has fields that no file holds: {', '.join(self.left_out)}"
            )
        value = _json.decode_form(self.form, [values[names] for names in self.stored])
        if self.box is None:
            return Leaf(value)
        fields = _json.decode_fields(self.fields, self.var_type)
        return Leaf(value, _json.loaded_type(self.box), fields)


def record_of(path: Path, leaf: Leaf, *, in_collection: bool) -> tuple[Record, dict[Names, Any]]:
    """The record of a leaf, and the arrays to be written by name.

    With `in_collection`, the first key is a collection. Raises NotCarriedError if a checkpoint
    cannot hold the leaf.
    """
    stored: dict[Names, Stored] = {}
    arrays: dict[Names, Any] = {}
    for below, value in parts(leaf.value):
        names = names_of((*path, *below))
        stored[names] = found = describe(value)
        if found.is_read:
            arrays[names] = writable(to_bits(value))
    form = _json.encode_form(leaf.value)
    if leaf.box is None:
        return Record(path, stored, form), arrays
    var_type = registry.current().type_from_name(path[0]) if in_collection else nnx.Variable
    fields, left_out = _json.encode_fields(leaf.fields, var_type)
    box = f"{leaf.box.__module__}:{leaf.box.__qualname__}"
    return Record(path, stored, form, box, fields, left_out), arrays


def writable(value: Any) -> Any:
    """An array as orbax writes it: of one that each process has for itself, the first one's."""
    if isinstance(value, np.ndarray | jax.Array):
        try:
            tensorstore.dtype(value.dtype.name)
        except (TypeError, ValueError):
            raise NotCarriedError(
                f"has the dtype {value.dtype}, which orbax cannot write; convert it to another one"
            ) from None
    is_local = isinstance(value, jax.Array) and value.is_fully_addressable
    return np.asarray(value) if is_local and jax.process_count() > 1 else value


def stored_in(records: Sequence[Record]) -> dict[Names, Stored]:
    """Every array and scalar of a tree by its names."""
    return {names: stored for record in records for names, stored in record.stored.items()}


def batches(groups: Iterable[Sequence[Stored]]) -> Iterator[list[Stored]]:
    """Arrays as many as are read at once; those of a group stay together."""
    batch: list[Stored] = []
    size = 0
    for group in groups:
        own = sum(stored.nbytes for stored in group)
        if batch and size + own > _BATCH:
            yield batch
            batch, size = [], 0
        batch += group
        size += own
    yield batch


def names_of(path: Path) -> Names:
    """The names of a path's keys in the tree of arrays; a lone value has one too."""
    return tuple(map(_json.stored_name, path)) or (_json.stored_name(""),)


def parts(value: Any) -> list[tuple[Path, Any]]:
    """The arrays and scalars in a value, by their keys in it."""
    return [
        (tuple(map(key_of, keys)), part)
        for keys, part in jax.tree_util.tree_flatten_with_path(value)[0]
    ]


def key_of(entry: Any) -> Any:
    """The key in an entry of a JAX key path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def describe(value: Any) -> Stored:
    """What a checkpoint says of an array or scalar.

    Raises NotCarriedError if it is neither, or is traced or abstract.
    """
    if isinstance(value, Tracer):
        raise NotCarriedError("belongs to a trace; save outside of jax.jit")
    if isinstance(value, jax.Array) and is_key(value):
        return Stored("key", value.shape, str(value.dtype), implementation(value))
    if isinstance(value, jax.Array):
        return Stored("jax", value.shape, str(value.dtype))
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        kind = "numpy" if isinstance(value, np.ndarray) else "generic"
        return Stored(kind, value.shape, str(value.dtype))
    kind = type(value).__name__
    if PYTHON_TYPES.get(kind) is type(value):
        return Stored(kind, (), kind, value.hex() if isinstance(value, float) else value)
    if isinstance(value, jax.ShapeDtypeStruct):
        raise NotCarriedError("is an abstract array without a value")
    raise NotCarriedError(f"is a {kind}, which is neither an array nor a number or string")


def is_rng(path: Path) -> bool:
    """Whether a leaf of this collection and path is the key or the count of an RNG stream."""
    collection = path[0] if path else None
    if not isinstance(collection, str):
        return False
    return issubclass(registry.current().type_from_name(collection), nnx.RngState)


def tree_text(path: Path) -> str:
    """A path as messages write it."""
    return path_text(str(path[0]), path[1:]) if path else "the value"
