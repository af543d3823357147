"""A bounded, thread-safe memory of results that are worth computing once."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Remembers the most recently used results by key.

    Args:
      maxsize: how many results are kept.
    """

    def __init__(self, maxsize: int):
        self._maxsize = maxsize
        self._results: collections.OrderedDict[Any, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, compute: Callable[[], T]) -> T:
        """The result of a key, computed if it is not there, or if it cannot be hashed."""
        try:
            hash(key)
        except TypeError:
            return compute()
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        # Not under the lock: computing may come back here for another key.
        result = compute()
        with self._lock:
            # Another thread may have been faster, and all are to have the same result.
            result = self._results.setdefault(key, result)
            while len(self._results) > self._maxsize:
                self._results.popitem(last=False)
        return result

    def is_new(self, key: Any) -> bool:
        """Whether a key is seen for the first time; it is remembered."""
        seen = object()
        return self.get(key, lambda: seen) is seen  # type: ignore[return-value]
