"""Stand-ins for a ToLinen that is called with keys."""

import collections


class Called:
    """A bound Linen module with one key for all streams, as far as a call asks it for them.

    Args:
      key: the key.
      is_initializing: whether the call is one of `init`.
    """

    def __init__(self, key, *, is_initializing=False):
        self.is_initializing = lambda: is_initializing
        self.make_rng = lambda name: self.rng_counters.update([name]) or key
        self.scope = self
        self.rng_counters = collections.Counter()
