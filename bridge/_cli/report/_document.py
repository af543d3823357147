"""Holds a report as plain values: the JSON document, which the table shows too.

::

    {
        "schema": "linen-nnx-bridge/report",
        "version": 1,
        "target": str,
        "migrated": {
            "parameters": {
                "native": int,
                "total": int,
                "share": float,
                "native_bytes": int,
                "total_bytes": int,
            },
            "modules": {"native": int, "total": int, "share": float},
        },
        "modules": [  # each before its submodules
            {
                "path": str,  # keys joined by "/", "" for the model itself
                "name": str,
                "depth": int,  # the path's part below the parent; 0 for the model
                "class": str | null,  # null: not known, as the module was not seen running
                "kind": "linen" | "nnx" | "wrapped-linen" | "wrapped-nnx",
                "own": {"parameters": int, "bytes": int},
                "total": {"parameters": int, "bytes": int},  # submodules included
                "migrated": float,  # the share of these parameters in NNX modules
                "source": {"import_path": str, "file": str | null, "line": int | null} | null,
                "counterpart": {"exists": bool | null, "name": str | null},
            }
        ],
        "notes": [str],
        "check": {"min_migrated": float, "passed": bool} | null,  # what --min-migrated found
    }

`counterpart` is about Linen classes: `exists` is true for one that Flax ships and that has an NNX
class (`name`; for a part of a layer, such as the gates of an LSTM cell, the class of the layer's
counterpart), false for one that Flax ships and that has none, and null otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import linen as nn

from bridge._cli._command import is_of_user
from bridge._conversion.neutral import Path
from bridge._layers.table import layer_of_linen

from ._tree import ModuleEntry, above

_PUBLIC = ("flax.linen", "flax.nnx")


def document_of(target: str, modules: Sequence[ModuleEntry]) -> dict[str, Any]:
    """The report on the modules of a model.

    `target` is what the command line called the model.
    """
    root = modules[0]
    # Containers (`nnx.List`, `nnx.Dict`) are not modules, and a wrapper and what it wraps are one.
    are_native = [module.kind.is_native for module in modules]
    return {
        "target": target,
        "migrated": {
            "parameters": {
                "native": root.native.parameters,
                "total": root.total.parameters,
                "share": root.share,
                "native_bytes": root.native.bytes,
                "total_bytes": root.total.bytes,
            },
            "modules": {
                "native": sum(are_native),
                "total": len(are_native),
                "share": sum(are_native) / len(are_native),
            },
        },
        "modules": [*_entries(modules)],
        "notes": _notes_of(modules),
        "check": None,
    }


def _notes_of(modules: Sequence[ModuleEntry]) -> list[str]:
    """What keeps the figures from being the whole truth."""
    empty = ["/".join(module.path) or "the model" for module in modules if module.is_empty]
    unknown = [module for module in modules if module.cls is None]
    notes = []
    if empty:
        notes.append(
            f"no variables yet in the ToNNX at {', '.join(empty)}, so their parameters are not"
            " counted; give sample inputs, or call bridge.lazy_init where the model is made"
        )
    if unknown:
        notes.append(
            f"the classes of {len(unknown)} Linen modules are not known, as they were not seen"
            " running; give sample inputs"
        )
    return notes


def _entries(modules: Sequence[ModuleEntry]) -> Iterator[dict[str, Any]]:
    directory = pathlib.Path.cwd()
    counterparts: dict[Path, type | bool | None] = {}
    for module in modules:
        around = above(module.path, counterparts)
        parent = around[-1] if around else ()
        found = None if module.kind.is_native else counterpart_of(module.cls)
        if found is False and is_part(module.cls):
            found = counterparts.get(parent) or False
        counterparts[module.path] = found
        yield {
            "path": "/".join(module.path),
            "name": "/".join(module.path[len(parent) :]),
            "depth": len(around),
            "class": None if module.cls is None else _name(module.cls),
            "kind": str(module.kind),
            "own": dataclasses.asdict(module.own),
            "total": dataclasses.asdict(module.total),
            "migrated": module.share,
            "source": None if module.cls is None else source_of(module.cls, directory),
            "counterpart": {
                "exists": found if found is None else bool(found),
                "name": import_path(found) if isinstance(found, type) else None,
            },
        }


def _name(cls: type) -> str:
    """A class's name with the classes around it, without the functions."""
    return cls.__qualname__.rpartition("<locals>.")[2]


def counterpart_of(cls: type | None) -> type | bool | None:
    """The NNX class that stands for a Linen class.

    Returns False if Flax ships the Linen class and has no NNX one, and None if nothing is known of
    the class, so that a port of it is for its owner to write.
    """
    if cls is None:
        return None
    if (layer := layer_of_linen(cls)) is not None:
        return layer.nnx or False
    return False if _is_flax_linen(cls) else None


def is_part(cls: type | None) -> bool:
    """Whether a class is a part of Flax's own layers that programs cannot name."""
    return cls is not None and _is_flax_linen(cls) and getattr(nn, cls.__name__, None) is not cls


def import_path(cls: type) -> str:
    """The path to import a class by; for Flax's the public one."""
    for package in _PUBLIC:
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_flax_linen(cls: type) -> bool:
    return cls.__module__.startswith(f"{nn.__name__}.")


@functools.cache
def source_of(cls: type, directory: pathlib.Path) -> Mapping[str, str | int | None]:
    """What to import a class by; if its file is the user's and below `directory`, file and line."""
    place = {"import_path": import_path(cls), "file": None, "line": None}
    try:
        file = pathlib.Path(inspect.getfile(cls)).resolve()
        if is_of_user(str(file)):
            line = inspect.getsourcelines(cls)[1]
            return {**place, "file": file.relative_to(directory).as_posix(), "line": line}
    except (OSError, TypeError, ValueError):
        # Without a file, as in a notebook, or outside of the directory.
        pass
    return place
