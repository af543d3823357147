"""The import path of `flax.nnx.bridge.wrappers`."""

from ._functional import Functional, functional
from ._lazy_init import lazy_init
from ._to_linen import ToLinen, to_linen
from ._to_linen_class import to_linen_class
from ._to_nnx import ToNNX

__all__ = [
    "Functional",
    "ToLinen",
    "ToNNX",
    "functional",
    "lazy_init",
    "to_linen",
    "to_linen_class",
]
