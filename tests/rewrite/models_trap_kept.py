"""Layers that NNX lacks in this form, and attention and cells."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class DenseGeneralBatch(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(4, axis=-1, batch_dims=(0,))(x)


class EinsumCall(nn.Module):
    """the equation at the call"""

    @nn.compact
    def __call__(self, x):
        return nn.Einsum((4, 4))(x, "bti,io->bto")


class NormForced(nn.Module):
    """force_float32_reductions has no place"""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, force_float32_reductions=False)(x)


class NormFeatureAxes(nn.Module):
    """several feature axes raise in NNX"""

    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1))(x)


class AttentionOtherKeys(nn.Module):
    @nn.compact
    def __call__(self, x):
        other = nn.Dense(6)(x)
        return nn.MultiHeadDotProductAttention(2, qkv_features=4, out_features=4)(x, other)


class AttentionKeywords(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadAttention(2, use_bias=False, broadcast_dropout=False)(
            inputs_q=x, inputs_k=x, inputs_v=x
        )


class AttentionSoftmax(nn.Module):
    """force_fp32_for_softmax has no place"""

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, force_fp32_for_softmax=True)(x)


class CellSimple(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = nn.SimpleCell(4)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        outs = []
        for i in range(3):
            carry, y = cell(carry, x[:, i])
            outs.append(y)
        return jnp.stack(outs, 1)


class ArrayField(nn.Module):
    scale: Any = dataclasses.field(default_factory=lambda: np.full((4,), 0.5, "float32"))

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x) * self.scale


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=not train), None


class ScanStatic(nn.Module):
    """a flag is closed over"""

    @nn.compact
    def __call__(self, x, train=False):
        layer = nn.scan(
            Dropping,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
            in_axes=(nn.broadcast,),
        )
        return layer()(x, train)[0]


class NormOverDevices(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, axis_name="devices")(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = ScanStatic()(x, train)
        x = DenseGeneralBatch()(ArrayField()(x))
        x = EinsumCall()(x)
        x = NormForced()(x, train)
        x = NormFeatureAxes()(x)
        x = AttentionOtherKeys()(x)
        x = AttentionKeywords()(x)
        x = AttentionSoftmax()(x)
        return CellSimple()(x)
