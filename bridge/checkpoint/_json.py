"""What JSON holds of a checkpoint: the keys of paths, the fields of boxes, the form of values.

Nothing here imports a module or calls an object that a file names: types are looked up among those
that the program has loaded, and functions are not carried at all.
"""

from __future__ import annotations

import re
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import FrozenDict, meta

from bridge._flax_internals import class_hooks
from bridge._neutral import Key

_PLAIN = (type(None), bool, int, str)
_SEQUENCES = {"tuple": tuple, "list": list}
_MAPPINGS = {"dict": dict, "FrozenDict": FrozenDict}
_NUMBER = re.compile(r"-?\d+")


class NotCarriedError(Exception):
    """A value that JSON cannot hold, or a type that the program has not loaded."""


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
    quoted = urllib.parse.quote(key, safe="").replace(".", "%2E")
    if _NUMBER.fullmatch(quoted) or not quoted:
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted else "%"
    return quoted


def encode(value: Any) -> Any:
    """A static value as JSON.

    Args:
      value: None, a bool, number or string, a Variable type or box type, a partition spec, or a
        tuple, list or mapping of these. A mesh becomes None: it belongs to the program.

    Raises:
      NotCarriedError: anything else, a function for instance.
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
        # A spec may say more than its entries, which names reductions.
        if decode(encoded) == value:
            return encoded
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {name: [encode(item) for item in value]}
    for name, mapping in _MAPPINGS.items():
        if kind is mapping:
            return {name: [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, type) and issubclass(value, nnx.Variable | meta.AxisMetadata):
        return {"type": f"{value.__module__}:{value.__qualname__}"}
    raise NotCarriedError(f"a {kind.__name__}")


def decode(encoded: Any) -> Any:
    """The inverse of `encode`.

    Raises:
      NotCarriedError: a type that the program has not loaded.
    """
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    if name == "float":
        return float.fromhex(content)
    if name == "spec":
        return jax.sharding.PartitionSpec(*map(decode, content))
    if name == "type":
        return loaded_type(content)
    if name in _SEQUENCES:
        return _SEQUENCES[name](map(decode, content))
    return _MAPPINGS[name]({decode(k): decode(v) for k, v in content})


def loaded_type(name: str) -> type:
    """The Variable type or box type of this name, if the program has imported it."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, nnx.Variable | meta.AxisMetadata):
        return found
    raise NotCarriedError(f"type {name}, which the program has not imported")


def encode_fields(
    fields: Mapping[str, Any], var_type: type[nnx.Variable[Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a box as JSON, and the names of those that JSON cannot hold.

    Args:
      fields: the fields.
      var_type: the Variable type of the leaf's collection, whose own hooks go by name.
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
    return {
        name: getattr(var_type, name, None) if content == {"hook": name} else decode(content)
        for name, content in encoded.items()
    }


def encode_form(value: Any) -> Any:
    """The containers of a value as JSON, with a number at each leaf in JAX's order.

    Returns:
      JSON; if the value holds a container that only a program can make, JSON that says so.
    """
    tree = jax.tree.structure(value)
    try:
        return encode(tree.unflatten(range(tree.num_leaves)))
    except NotCarriedError as error:
        return {"not carried": str(error)}


def decode_form(form: Any, leaves: list[Any]) -> Any:
    """The inverse of `encode_form`, with the leaves in their places.

    Raises:
      NotCarriedError: the file could not hold the containers.
    """
    if isinstance(form, dict) and "not carried" in form:
        raise NotCarriedError(f"its value is in {form['not carried']}, which no file holds")
    return jax.tree.map(lambda index: leaves[index], decode(form))
