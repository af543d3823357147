"""The rows of Flax's own layers.

Source: flax/linen/{linear,attention,normalization,recurrent}.py and flax/nnx/nn/*.py @ 0.12.7,
0.12.8 and 0.12.12. Their layers differ in two points: only 0.12.12 has `nnx.RoPE`, and only there
the scales of `nnx.WeightNorm` are Variables and not bare arrays.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from flax import nnx

from .layer import KeptByPath, LayerRow, Seen, SizeOf


def _at(path: str, axis: int) -> SizeOf:
    """The size of an axis of a leaf."""

    def size(seen: Seen) -> Any:
        shape = seen.shape(path)
        return None if shape is None else shape[axis]

    return size


def _bias_shape(seen: Seen) -> Any:
    return seen.shape("bias")


def _last(seen: Seen) -> Any:
    return None if seen.input is None else seen.input[-1]


def _conv(seen: Seen) -> Any:
    shape = seen.shape("kernel")
    return None if shape is None else shape[-2] * seen.fields.get("feature_group_count", 1)


def _transposed(seen: Seen) -> Any:
    shape = seen.shape("kernel")
    return None if shape is None else shape[-1 if seen.fields.get("transpose_kernel") else -2]


def _normalised(seen: Seen) -> Any:
    for shape in filter(None, map(seen.shape, ("scale", "bias", "mean"))):
        return shape[0] if len(shape) == 1 else None
    return _last(seen)


def _general(seen: Seen) -> Any:
    if seen.input is None:
        return None
    axis = seen.fields["axis"]
    return seen.input[axis] if isinstance(axis, int) else tuple(seen.input[each] for each in axis)


def _key(seen: Seen) -> Any:
    query, key = seen.shape("query/kernel"), seen.shape("key/kernel")
    return None if key is None or query is None or key[0] == query[0] else key[0]


def _same(*names: str) -> dict[str | tuple[str, ...], str]:
    """Leaves with the same name on both sides."""
    return dict(zip(names, names, strict=True))


def _fused(nnx_path: str, gates: str, linen: str) -> dict[str | tuple[str, ...], str]:
    """The leaves of gates that NNX has as one."""
    return {tuple(linen.format(gate) for gate in gates): nnx_path}


def _cell(cls: type[Any], linen: type[Any], gate: str, **more: Any) -> LayerRow:
    gate = f"{gate}/kernel"
    return LayerRow(
        cls,
        (linen,),
        fields={"features": "hidden_features"},
        sizes={"in_features": _at(gate, 0)},
        carried={"features": _at(gate, -1)},
        **more,
    )


_LINEAR = ("Dense", "DenseGeneral", "Einsum")
_LSTM = ("LSTMCell", "OptimizedLSTMCell")
_KERNEL, _NORM = _same("kernel", "bias"), _same("scale", "bias")
_OUT = {"features": "out_features"}
_NUM = {"num_features": _normalised}

# By name: not every version of Flax has them, and some name others again.
_ROPE = getattr(nnx, "RoPE", None)
_FP8 = tuple(cls for name, cls in vars(nn).items() if "Fp8" in name and isinstance(cls, type))

ROWS = (
    LayerRow(
        nnx.Linear,
        (nn.Dense,),
        _LINEAR,
        _KERNEL,
        fields=_OUT,
        sizes={"in_features": _at("kernel", 0)},
    ),
    LayerRow(
        nnx.LinearGeneral,
        (nn.DenseGeneral,),
        _LINEAR,
        _KERNEL,
        fields={**_OUT, "batch_dims": "batch_axis"},
        other_fields=("dot_general_cls", "batch_dims"),
        sizes={"in_features": _general},
    ),
    LayerRow(
        nnx.Einsum,
        (nn.Einsum,),
        _LINEAR,
        _KERNEL,
        fields={"shape": "kernel_shape"},
        sizes={"bias_shape": _bias_shape},
        sized=("use_bias",),
    ),
    # Qwix has the Linen class of LoRA.
    LayerRow(nnx.LoRALinear, (), _LINEAR, _KERNEL, fields=_OUT),
    LayerRow(nnx.LoRA, (), (*_LINEAR, "LoRA"), inner="base_module", has_parts=True),
    LayerRow(nnx.Conv, (nn.Conv,), (), _KERNEL, fields=_OUT, sizes={"in_features": _conv}),
    LayerRow(
        nnx.ConvTranspose,
        (nn.ConvTranspose,),
        (),
        _KERNEL,
        fields=_OUT,
        sizes={"in_features": _transposed},
    ),
    LayerRow(nnx.Embed, (nn.Embed,), leaves=_same("embedding")),
    LayerRow(nnx.PReLU, (nn.PReLU,), leaves=_same("negative_slope")),
    LayerRow(nnx.BatchNorm, (nn.BatchNorm,), leaves={**_NORM, **_same("mean", "var")}, sizes=_NUM),
    LayerRow(nnx.LayerNorm, (nn.LayerNorm,), leaves=_NORM, sizes=_NUM),
    LayerRow(nnx.RMSNorm, (nn.RMSNorm,), leaves=_same("scale"), sizes=_NUM),
    LayerRow(nnx.GroupNorm, (nn.GroupNorm,), leaves=_NORM, sizes={"num_features": _last}),
    LayerRow(nnx.InstanceNorm, (nn.InstanceNorm,), leaves=_NORM, sizes={"num_features": _last}),
    LayerRow(nnx.SpectralNorm, (nn.SpectralNorm,), kept_by_path=KeptByPath("batch_stats")),
    LayerRow(nnx.WeightNorm, (nn.WeightNorm,), kept_by_path=KeptByPath("scales", "scale")),
    LayerRow(nnx.Dropout, (nn.Dropout,)),
    LayerRow(
        nnx.MultiHeadAttention,
        (nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention),
        other_fields=("qkv_dot_general_cls", "out_dot_general_cls"),
        sizes={"in_features": _at("query/kernel", 0), "in_kv_features": _key},
        defaults={"decode": "False"},
    ),
    _cell(nnx.LSTMCell, nn.LSTMCell, "ii", also=_LSTM, leaves={"if": "if_"}),
    _cell(
        nnx.OptimizedLSTMCell,
        nn.OptimizedLSTMCell,
        "ii",
        also=_LSTM,
        leaves={
            **_fused("dense_i/kernel", "ifgo", "i{}/kernel"),
            **_fused("dense_h/kernel", "ifgo", "h{}/kernel"),
            **_fused("dense_h/bias", "ifgo", "h{}/bias"),
        },
    ),
    _cell(nnx.SimpleCell, nn.SimpleCell, "i", leaves={"i": "dense_i", "h": "dense_h"}),
    _cell(
        nnx.GRUCell,
        nn.GRUCell,
        "ir",
        leaves={
            **_fused("dense_i/kernel", "rzn", "i{}/kernel"),
            **_fused("dense_i/bias", "rzn", "i{}/bias"),
            **_fused("dense_h/kernel", "rzn", "h{}/kernel"),
        },
        zero=("hn/bias",),
    ),
    LayerRow(nnx.RNN, (nn.RNN,), inner="cell", has_parts=True),
    LayerRow(nnx.Bidirectional, (nn.Bidirectional,), has_parts=True),
    LayerRow(nnx.Sequential, (nn.Sequential,), has_parts=True),
    *([LayerRow(_ROPE, computed=frozenset({"cached_sin", "cached_cos"}))] if _ROPE else []),
    LayerRow(None, (nn.ConvLocal,)),
    LayerRow(None, (nn.MGUCell,), parts=frozenset({"if", "in", "hf", "hn"})),
    LayerRow(None, (nn.ConvLSTMCell,), parts=frozenset({"ih", "hh"})),
    LayerRow(None, _FP8, collection="_overwrite_with_gradient"),
)
