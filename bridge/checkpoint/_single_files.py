"""Checkpoints that are one file: msgpack of `flax.serialization`, safetensors, and npz.

safetensors and npz hold arrays by name. A name is a path: its keys are joined by `/` if any name
has one, else by dots. npz has no bfloat16; programs write its bytes as they are. All are read, and
safetensors is written, with the layout beside the arrays, which names alone do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import serialization

from bridge._conversion.neutral import nest
from bridge._errors import CheckpointError

from ._stored import parts

FORMATS = ("msgpack", "safetensors", "npz")
LAYOUTS = ("linen", "nnx")
# NumPy's name for the bytes of a dtype that it does not know.
_BFLOAT16_BYTES = np.dtype("V2")
_HEADER_LENGTH = 8
# How msgpack of a mapping begins, as a state dict is one. Pickles begin as an empty mapping does.
_EMPTY_MAPPING = b"\x80"
_MAPPINGS = {bytes([first]) for first in (*range(0x81, 0x90), 0xDE, 0xDF)}
# In the place that safetensors has for remarks, which readers of arrays pass over.
_WRITER = "linen-nnx-bridge"


def format_of(path: Any) -> str | None:
    """Which of the formats a file has, by how it begins; None for any other file.

    An archive without files is npz if its name says so.
    """
    with path.open("rb") as file:
        head = file.read(64)
    # Any archive without files begins alike.
    is_empty = head[:4] == b"PK\x05\x06" and path.suffix == ".npz"
    if head[:4] == b"PK\x03\x04" or is_empty:
        return "npz"
    if head[_HEADER_LENGTH : _HEADER_LENGTH + 1] == b"{" and head[6:8] == b"\0\0":
        return "safetensors"
    return "msgpack" if head == _EMPTY_MAPPING or head[:1] in _MAPPINGS else None


def read(path: Any, form: str) -> Any:
    """The tree in a file.

    Raises CheckpointError if the library that the format takes is not installed, or if an npz file
    has pickled objects, which are not read.
    """
    if form == "msgpack":
        return serialization.msgpack_restore(path.read_bytes())
    if form == "npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _nested({name: _known(array) for name, array in arrays.items()})
        except ValueError as error:
            # NumPy has no type of its own for this error.
            if "allow_pickle" not in str(error):
                raise
            raise CheckpointError(
                "pickled objects are not read, as this could run any code; there are some in",
                path,
                "Save the file without them, or their values as arrays of numbers.",
            ) from None
    with _safetensors(path).safe_open(path, framework="numpy") as file:
        return _nested({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def is_own(path: Any, form: str) -> bool:
    """Whether a file is one that `write` wrote."""
    return _remarks(path, form).get("writer") == _WRITER


def noted_layout(path: Any, form: str) -> str | None:
    """The layout that was passed to `write`; None where no layout is noted."""
    found = _remarks(path, form).get("layout")
    return found if found in LAYOUTS else None


def _remarks(path: Any, form: str) -> Mapping[str, str]:
    """What a file of safetensors says beside its arrays."""
    if form != "safetensors":
        return {}
    with _safetensors(path).safe_open(path, framework="numpy") as file:
        return file.metadata() or {}


def write(path: Path, tree: Mapping[str, Any], layout: str, *, out: object) -> None:
    """Writes nested dicts of arrays as a file of safetensors; the inverse of `read`.

    `layout` is one of `LAYOUTS`, which is noted beside the arrays. Messages say that the file will
    be at `out`. Raises CheckpointError if the format cannot hold the tree, or if its library is not
    installed.
    """
    named: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for keys, value in parts(tree):
        texts = list(map(str, keys))
        name = "/".join(texts)
        # Not `np.ascontiguousarray`, which makes a vector of a scalar.
        array = np.asarray(value, order="C")
        if any("/" in text or "." in text for text in texts):
            problems.append((name, "safetensors joins keys by '.', and this one has it"))
        elif array.dtype.kind not in "biufc" and array.dtype != jnp.bfloat16:
            problems.append((name, f"safetensors cannot hold {array.dtype}"))
        named[".".join(texts)] = array
    if problems:
        raise CheckpointError(
            "the format safetensors cannot hold these leaves, for",
            out,
            "Choose another format.",
            unsupported=problems,
        )
    _safetensors(out)
    from safetensors.numpy import save_file

    save_file(named, path, metadata={"writer": _WRITER, "layout": layout})


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
    separator = "/" if any("/" in name for name in named) else "."
    return nest({tuple(name.split(separator)): value for name, value in named.items()})


def _known(array: Any) -> Any:
    return array.view(jnp.bfloat16) if array.dtype == _BFLOAT16_BYTES else array


def _safetensors(path: Any) -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise CheckpointError(
            "the library safetensors is not installed, which is needed for",
            path,
            "pip install 'linen-nnx-bridge[safetensors]'",
        ) from error
    return safetensors
