"""A bounded, thread-safe cache."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MISSING = object()


class BoundedCache(Generic[T]):
    """Remembers the `maxsize` most recently used results by key."""

    def __init__(self, maxsize: int):
        self._maxsize = maxsize
        self._results: collections.OrderedDict[Any, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: object, default: object = None) -> T | Any:
        """The result of a key, or the default."""
        with self._lock:
            if key not in self._results:
                return default
            self._results.move_to_end(key)
            return self._results[key]

    def keep(self, key: object, result: T) -> T:
        """Remembers a result; the first one of a key stays."""
        with self._lock:
            # Another thread may have stored its result first; every thread returns that one.
            result = self._results.setdefault(key, result)
            while len(self._results) > self._maxsize:
                self._results.popitem(last=False)
        return result

    def get(self, key: object, compute: Callable[[], T]) -> T:
        """The result of a key, computed if it is not there, or if it cannot be hashed."""
        try:
            hash(key)
        except TypeError:
            return compute()
        found = self.find(key, _MISSING)
        # Not under the lock: computing may call this method again for another key.
        return self.keep(key, compute()) if found is _MISSING else found

    def is_new(self, key: object) -> bool:
        """Whether a key is seen for the first time; it is remembered."""
        seen = object()
        return self.get(key, lambda: seen) is seen  # type: ignore[return-value]
