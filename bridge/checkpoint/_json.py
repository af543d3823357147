"""Writes as JSON the keys of paths, the fields of boxes and the form of values; reads them.

Nothing here imports a module, reads an attribute or calls an object that a file names: types are
looked up in the dictionaries of modules that the program has loaded, hooks are those that Flax has,
and functions are not carried at all.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import FrozenDict, meta

import registry
from bridge._conversion.neutral import Key
from bridge._flax.variables import HOOKS, class_hooks

_PLAIN = (type(None), bool, int, str)
_NUMBER = re.compile(r"-?\d+")


class NotCarriedError(Exception):
    """A value that JSON cannot hold, or a type that the program has not loaded."""


class MalformedError(Exception):
    """JSON that no checkpoint of this package has."""


def stored_name(key: Key) -> str:
    """The name of a key in orbax's tree, another one for every key.

    Orbax joins names with dots, so those of a key are escaped; so are the digits of a string that
    would read as an integer.
    """
    if type(key) is int:
        return str(key)
    if isinstance(key, tuple):
        return f"({','.join(map(stored_name, key))})"
    if not isinstance(key, str):
        raise NotCarriedError(f"a key of type {type(key).__name__}")
    return _quoted(key)


@functools.lru_cache(maxsize=4096)
def _quoted(key: str) -> str:
    # The leaves of a model share few names.
    quoted = urllib.parse.quote(key, safe="").replace(".", "%2E")
    if _NUMBER.fullmatch(quoted) or not quoted:
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted else "%"
    return quoted


def encode(value: Any) -> Any:
    """A static value as JSON.

    The value is None, a bool, number or string, a Variable type or box type, a partition spec, or a
    tuple, list or mapping of these. A mesh becomes None: it belongs to the program. Raises
    NotCarriedError for anything else, such as a function.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return {"float": value.hex()}
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return None
    if kind is jax.sharding.PartitionSpec:
        encoded = {"spec": [encode(names) for names in value]}
        # A spec may also name reductions, besides its entries.
        if decode(encoded) == value:
            return encoded
    if kind in (tuple, list):
        return {kind.__name__: [encode(item) for item in value]}
    if kind in (dict, FrozenDict):
        return {kind.__name__: [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, type) and issubclass(value, nnx.Variable | meta.AxisMetadata):
        return {"type": f"{value.__module__}:{value.__qualname__}"}
    raise NotCarriedError(f"a {kind.__name__}")


def decode(encoded: Any) -> Any:
    """The inverse of `encode`.

    Raises NotCarriedError for a type that the program has not loaded, and MalformedError for JSON
    that `encode` does not give.
    """
    if type(encoded) in _PLAIN:
        return encoded
    try:
        ((tag, content),) = encoded.items()
        return _DECODERS[tag](content)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedError(f"{_short(encoded)} where a value is expected") from error


def _items(content: list[Any]) -> list[Any]:
    return [decode(item) for item in content]


def _pairs(content: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(value) for key, value in content}


def _spec(content: list[Any]) -> jax.sharding.PartitionSpec:
    spec = jax.sharding.PartitionSpec(*_items(content))
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        if not all(name is None or isinstance(name, str) for name in names):
            raise MalformedError(f"a partition spec with {_short(entry)}")
    return spec


def loaded_type(name: str) -> type:
    """The Variable type or box type of this name, if the program has imported it.

    Modules and classes are looked into without asking them for attributes, as that may import.
    """
    module, _, qualname = name.partition(":")
    if module == registry.auto.__name__:
        # Types that are made on demand have no code to import.
        return registry.auto.for_collection(urllib.parse.unquote(qualname))
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, types.ModuleType | type):
            break
        found = vars(found).get(part)
    if isinstance(found, type) and issubclass(found, nnx.Variable | meta.AxisMetadata):
        return found
    raise NotCarriedError(f"type {name}, which the program has not imported")


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "spec": _spec,
    "type": loaded_type,
    "tuple": lambda content: tuple(_items(content)),
    "list": _items,
    "dict": _pairs,
    "FrozenDict": lambda content: FrozenDict(_pairs(content)),
}


def encode_fields(
    fields: Mapping[str, Any], var_type: type[nnx.Variable[Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a box as JSON, and the names of those that JSON cannot hold.

    Hooks of `var_type`, the Variable type of the leaf's collection, are stored by name.
    """
    encoded: dict[str, Any] = {}
    left_out: list[str] = []
    hooks = class_hooks(var_type)
    for name, value in fields.items():
        try:
            if name in hooks and value is getattr(var_type, name):
                encoded[name] = {"hook": name}
            else:
                encoded[name] = encode(value)
        except NotCarriedError as error:
            left_out.append(f"{name} ({error})")
    return encoded, tuple(left_out)


def decode_fields(encoded: Mapping[str, Any], var_type: type[nnx.Variable[Any]]) -> dict[str, Any]:
    """The inverse of `encode_fields`, for what it could hold."""
    fields: dict[str, Any] = {}
    for name, content in encoded.items():
        if content == {"hook": name} and name in HOOKS:
            fields[name] = getattr(var_type, name, None)
        else:
            fields[name] = decode(content)
    return fields


def encode_form(value: Any) -> Any:
    """The containers of a value as JSON, with a number at each leaf in JAX's order.

    If the value holds a container that only a program can make, the JSON says so.
    """
    tree = jax.tree.structure(value)
    try:
        return encode(tree.unflatten(range(tree.num_leaves)))
    except NotCarriedError as error:
        return {"not carried": str(error)}


def decode_form(form: Any, leaves: list[Any]) -> Any:
    """The inverse of `encode_form`, with the leaves in their places.

    Raises NotCarriedError if the file could not hold the containers, and MalformedError for JSON
    that `encode_form` does not give for so many leaves.
    """
    if isinstance(form, dict) and form.keys() == {"not carried"}:
        raise NotCarriedError(f"its value is in {form['not carried']}, which no file holds")
    made = decode(form)
    numbers = jax.tree.leaves(made)
    if any(type(number) is not int for number in numbers) or numbers != list(range(len(leaves))):
        raise MalformedError(f"{_short(form)} where containers of numbered leaves are expected")
    return jax.tree.map(lambda index: leaves[index], made)


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 60 else f"{text[:59]}…"
