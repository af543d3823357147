"""The import path of `flax.nnx.bridge.interop`."""

from ._linen_style_module.interop import linen_in_bridge_mdl, nnx_in_bridge_mdl

__all__ = ["linen_in_bridge_mdl", "nnx_in_bridge_mdl"]
