"""Variable types made on demand for collections that nobody registered.

``registry.auto.counter`` is the Variable type of the collection ``'counter'``. It is made the first
time somebody asks, stays the same object afterwards, and has a home that can be imported, so that a
model that holds one pickles here and unpickles in a fresh process.

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
            # Pickle finds a class by its qualified name and splits that at dots, so it is quoted.
            qualname = urllib.parse.quote(name, safe="").replace(".", "%2E")
            typ = type(name, (nnx.Variable,), {"__module__": __name__, "__qualname__": qualname})
            _types[name] = typ
        return typ


def collection_of(typ: type) -> str | None:
    """The collection that an automatic type was made for, None for any other type."""
    return typ.__name__ if _types.get(typ.__name__) is typ else None


def __getattr__(name: str) -> type[nnx.Variable[Any]]:
    if name.startswith("__") and name.endswith("__"):
        # The import system and pickle probe modules for such names.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return for_collection(urllib.parse.unquote(name))
