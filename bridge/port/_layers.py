"""How the variables of Flax's own layers are named and laid out on both sides.

Most layers have the same leaves with the same shapes and need no entry but their name. The
recurrent cells are the exception: NNX fuses the gates of three of them into one kernel.

Source: flax/linen/{linear,attention,normalization,recurrent}.py and flax/nnx/nn/*.py @ 0.12.7,
0.12.8 and 0.12.12, which lay their variables out alike but for two classes: only the last has
`nnx.RoPE`, and the scales of its `nnx.WeightNorm` are Variables, which were bare arrays before.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx

from bridge._conversion.neutral import Path


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """How one NNX class holds what a Linen class holds.

    Attributes:
      name: what the report calls the rule.
      linen: the Linen classes with this layout.
      renamed: the Linen name by the NNX name, where they differ.
      fused: the Linen paths whose leaves, side by side on the last axis, are the leaf at an NNX
        path.
      zero: Linen leaves that NNX has no place for, and which must be zero.
      inner: the attribute whose layer Linen may hold in this one's place.
      computed: the Variables that the constructor computes from its arguments; no weights.
    """

    name: str
    linen: frozenset[str]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Mapping[Path, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    zero: tuple[Path, ...] = ()
    inner: str | None = None
    computed: frozenset[str] = frozenset()


def _rule(name: str, *linen: str, **fields: Any) -> LayerRule:
    return LayerRule(name, frozenset(linen or (name,)), **fields)


def _gates(prefix: str, gates: str, leaf: str) -> tuple[Path, ...]:
    return tuple((prefix + gate, leaf) for gate in gates)


_LINEAR = ("Dense", "DenseGeneral", "Einsum")
_LSTM = ("LSTMCell", "OptimizedLSTMCell")

# By name: not every version of Flax that is supported has them.
_OF_SOME_VERSIONS = {
    "RoPE": LayerRule("RoPE", frozenset(), computed=frozenset({"cached_sin", "cached_cos"})),
}

RULES: Mapping[type[Any], LayerRule] = MappingProxyType(
    {
        nnx.Linear: _rule("Dense", *_LINEAR),
        nnx.LinearGeneral: _rule("DenseGeneral", *_LINEAR),
        nnx.Einsum: _rule("Einsum", *_LINEAR),
        nnx.LoRALinear: _rule("LoRA", *_LINEAR),
        nnx.LoRA: _rule("LoRA", *_LINEAR, "LoRA", inner="base_module"),
        nnx.Conv: _rule("Conv"),
        nnx.ConvTranspose: _rule("ConvTranspose"),
        nnx.Embed: _rule("Embed"),
        nnx.PReLU: _rule("PReLU"),
        nnx.BatchNorm: _rule("BatchNorm"),
        nnx.LayerNorm: _rule("LayerNorm"),
        nnx.RMSNorm: _rule("RMSNorm"),
        nnx.GroupNorm: _rule("GroupNorm"),
        nnx.InstanceNorm: _rule("InstanceNorm"),
        nnx.MultiHeadAttention: _rule(
            "MultiHeadDotProductAttention",
            "MultiHeadDotProductAttention",
            "MultiHeadAttention",
            "SelfAttention",
        ),
        nnx.LSTMCell: _rule("LSTMCell", *_LSTM, renamed={"if_": "if"}),
        nnx.OptimizedLSTMCell: _rule(
            "OptimizedLSTMCell",
            *_LSTM,
            fused={
                ("dense_i", "kernel"): _gates("i", "ifgo", "kernel"),
                ("dense_h", "kernel"): _gates("h", "ifgo", "kernel"),
                ("dense_h", "bias"): _gates("h", "ifgo", "bias"),
            },
        ),
        nnx.SimpleCell: _rule("SimpleCell", renamed={"dense_i": "i", "dense_h": "h"}),
        nnx.GRUCell: _rule(
            "GRUCell",
            fused={
                ("dense_i", "kernel"): _gates("i", "rzn", "kernel"),
                ("dense_i", "bias"): _gates("i", "rzn", "bias"),
                ("dense_h", "kernel"): _gates("h", "rzn", "kernel"),
            },
            zero=(("hn", "bias"),),
        ),
        nnx.RNN: _rule("RNN", inner="cell"),
        nnx.Bidirectional: _rule("Bidirectional"),
        nnx.Sequential: _rule("Sequential"),
        nnx.SpectralNorm: _rule("SpectralNorm"),
        nnx.WeightNorm: _rule("WeightNorm"),
        **{getattr(nnx, n): rule for n, rule in _OF_SOME_VERSIONS.items() if hasattr(nnx, n)},
    }
)

# What Flax's own layers call their leaves, on both sides.
LEAVES = frozenset({"bias", "embedding", "kernel", "mean", "negative_slope", "scale", "var"})
NORMS = (nnx.SpectralNorm, nnx.WeightNorm)
# The dicts in which NNX keeps by path what Linen keeps in variables with a slash in their name.
_STATISTICS, _SCALES = "batch_stats", "scales"

_WITHOUT_NNX_CLASS = re.compile(r"(ConvLocal|MGUCell|ConvLSTMCell|Fp8\w+|NANOOFp8\w+)_\d+")
_FP8_COLLECTION = "_overwrite_with_gradient"
_LINEN_NAMES = frozenset().union(*(rule.linen for rule in RULES.values()))


def rule_of(cls: type[Any] | None) -> LayerRule | None:
    """The rule of a class or of the nearest built-in class that it derives from."""
    for base in cls.__mro__ if cls is not None else ():
        if base in RULES:
            return RULES[base]
    return None


def norm_leaves(norm: Any, held: Mapping[Any, Any]) -> Iterator[tuple[Path, str, Any]]:
    """(path of the normalised parameter, name, leaf) of what a norm keeps for its layer.

    Args:
      norm: a `SpectralNorm` or `WeightNorm`.
      held: what is below the norm by attribute.
    """
    is_spectral = isinstance(norm, nnx.SpectralNorm)
    for key, leaf in held.get(_STATISTICS if is_spectral else _SCALES, {}).items():
        yield (key[:-1], key[-1], leaf) if is_spectral else (key, "scale", leaf)


def is_linen_layer(name: str) -> bool:
    """Whether a Linen class of this name has a rule."""
    return name in _LINEN_NAMES


def without_nnx_class(collection: str, path: Path, siblings: frozenset[str]) -> str | None:
    """The Linen class that a leaf belongs to, if it is one that NNX has no counterpart of.

    Args:
      collection: the leaf's collection.
      path: its path.
      siblings: the names beside the leaf's module, which tell an `MGUCell` of any name.
    """
    if collection == _FP8_COLLECTION:
        return "Fp8"
    for key in path:
        if match := _WITHOUT_NNX_CLASS.fullmatch(str(key)):
            return match.group(1)
    return {frozenset(_MGU): "MGUCell", frozenset(_CONV_LSTM): "ConvLSTMCell"}.get(siblings)


_MGU = ("if", "in", "hf", "hn")
_CONV_LSTM = ("ih", "hh")
