"""`HeldModule`: the Linen module of a ToNNX as a static attribute, compared by what it holds."""

from __future__ import annotations

import dataclasses

from flax import linen as nn

from bridge._fingerprint import Look

# Equal fields of these types have equal hashes, and hashing them takes no time.
_HASHED = (bool, int, float, str, bytes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeldModule:
    """A Linen module that equals another if a program cannot distinguish them.

    A Linen module compares its fields with `==`. For arrays the result is another array, and `==`
    also holds for 2 and 2.0, which a program distinguishes. So fields are compared by their
    fingerprints, which hold the bytes of arrays.
    """

    module: nn.Module

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeldModule):
            return NotImplemented
        if self.module is other.module:
            return True
        own, others = (Look(each.module, made=True).fingerprint for each in (self, other))
        return own == others

    def __hash__(self) -> int:
        # At each call of `nnx.jit`, so not by the fingerprint.
        names = (field.name for field in dataclasses.fields(self.module))
        fields = (getattr(self.module, name, None) for name in names)
        return hash((type(self.module).__name__, *(x for x in fields if isinstance(x, _HASHED))))

    def __repr__(self) -> str:
        return repr(self.module)
