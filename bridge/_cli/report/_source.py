"""Finds where a module's class is defined, and the NNX class that stands for it."""

from __future__ import annotations

import functools
import inspect
import pathlib
import sys
from collections.abc import Mapping

from flax import linen as nn

from bridge._cli._places import is_of_user
from bridge._layers.table import layer_of_linen

_PUBLIC = ("flax.linen", "flax.nnx")


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
