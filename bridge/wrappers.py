"""The import path of `flax.nnx.bridge.wrappers`."""

from ._functions.functional import Functional, functional
from ._initialization.lazy_init import lazy_init
from ._linen_in_nnx.to_nnx import ToNNX
from ._nnx_in_linen.to_linen import ToLinen, to_linen, to_linen_class

__all__ = [
    "Functional",
    "ToLinen",
    "ToNNX",
    "functional",
    "lazy_init",
    "to_linen",
    "to_linen_class",
]
