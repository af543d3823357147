"""Variable types made on demand for collections that nobody registered.

``registry.auto.counter`` is the Variable type of the collection ``'counter'``. It is made on the
first request and stays the same object. It can be imported by name, so a model that holds one
unpickles in a fresh process. It is registered with Flax too, unless Flax already has a type of that
name.

Example::

  >>> from registry import auto
  >>> auto.counter.__name__
  'counter'
  >>> auto.counter is auto.counter
  True
"""

from __future__ import annotations

import threading
import urllib.parse
from typing import Any

from flax import nnx

_types: dict[str, type[nnx.Variable[Any]]] = {}
_lock = threading.Lock()


def for_collection(name: str) -> type[nnx.Variable[Any]]:
    """The Variable type of an unregistered collection, made once.

    Args:
      name: the collection's name, any string.

    Returns:
      A direct subclass of `nnx.Variable` called `name`.
    """
    with _lock:
        typ = _types.get(name)
        if typ is None:
            qualname = _quoted(name)
            typ = type(name, (nnx.Variable,), {"__module__": __name__, "__qualname__": qualname})
            _types[name] = typ
            _make_known(name, typ)
        return typ


def found(name: str) -> type[nnx.Variable[Any]] | None:
    """The automatic type of a collection if there is one already."""
    return _types.get(name)


def collection_of(typ: type) -> str | None:
    """The collection that an automatic type was made for, None for any other type."""
    return typ.__name__ if _types.get(typ.__name__) is typ else None


def _make_known(name: str, typ: type[nnx.Variable[Any]]) -> None:
    """Tells Flax, so that `nnx.variable_type_from_name` and filters by type find the Variables."""
    try:
        nnx.variable_type_from_name(name)
    except ValueError:
        nnx.register_variable_name(name, typ)


def _quoted(name: str) -> str:
    """A name under which pickle finds the type: without dots, and not taken in this module."""
    quoted = urllib.parse.quote(name, safe="").replace(".", "%2E")
    if _is_probed(quoted) or quoted in globals():
        quoted = "".join(f"%{byte:02X}" for byte in quoted[:1].encode()) + quoted[1:]
    return quoted


def _is_probed(name: str) -> bool:
    """Whether the import system, pickle or pytest look for such a name in every module."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return is_dunder or name in ("pytest_plugins", "pytestmark")


def __getattr__(name: str) -> type[nnx.Variable[Any]]:
    if _is_probed(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return for_collection(urllib.parse.unquote(name))
