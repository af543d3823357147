"""Which NNX class stands for a Linen class that Flax ships."""

from __future__ import annotations

import types
from collections.abc import Mapping

from flax import linen as nn
from flax import nnx

# Source: the public names of flax.linen and flax.nnx @ 0.12.8 and 0.12.12.
_SAME_NAME = (
    "BatchNorm",
    "Bidirectional",
    "Conv",
    "ConvTranspose",
    "Dropout",
    "Einsum",
    "Embed",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "OptimizedLSTMCell",
    "PReLU",
    "RMSNorm",
    "RNN",
    "Sequential",
    "SimpleCell",
    "SpectralNorm",
    "WeightNorm",
)

COUNTERPARTS: Mapping[type, type] = types.MappingProxyType(
    {
        **{getattr(nn, name): getattr(nnx, name) for name in _SAME_NAME},
        nn.Dense: nnx.Linear,
        nn.DenseGeneral: nnx.LinearGeneral,
        nn.MultiHeadAttention: nnx.MultiHeadAttention,
        nn.MultiHeadDotProductAttention: nnx.MultiHeadAttention,
        nn.SelfAttention: nnx.MultiHeadAttention,
    }
)
