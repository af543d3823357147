"""What becomes of the constructor of each of Flax's own layers, and of its call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.core import meta

from ._records import Instance, Shape


@dataclasses.dataclass(frozen=True)
class Layer:
    """The counterpart of a Linen layer.

    Attributes:
        name: of the NNX class.
        sizes: what its constructor needs besides: a function from what was seen of an instance and
            its abstract variables to a size or None, by name.
        renames: NNX names by Linen field names.
        positional: the NNX names that may be given by position.
        modes: the Linen fields that NNX takes in the call as well.
        extra: arguments that are always given, unless the program gives them.
        call: names of the positional arguments of Linen's call.
        keep: how many of these are positional in NNX too.
        unsupported: Linen fields that have no place in NNX.
        dropped: Linen fields that the sizes tell.
        needed: Linen fields without which there is no NNX layer.
        optional: sizes that a layer may not have.
        rngs: whether the constructor takes `rngs`.
        carried: Linen fields of which the variables know better, as a cell takes the size of the
            carry that it is given: a function as in `sizes`, by name.
    """

    name: str
    sizes: Mapping[str, Callable[[Instance, Any], Any]] = dataclasses.field(default_factory=dict)
    renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    positional: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    call: tuple[str, ...] = ()
    keep: int = 99
    unsupported: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rngs: bool = True
    carried: Mapping[str, Callable[[Instance, Any], Any]] = dataclasses.field(default_factory=dict)

    def has_next(self, name: str, positional: Collection[str]) -> bool:
        """Whether the argument behind one is given by position."""
        names = dict(zip(self.positional, self.positional[1:], strict=False))
        return names.get(name) in positional

    def refuses_none(self, cls: type, field: str) -> bool:
        """Whether None is the default of a Linen field, and NNX has another one."""
        taken = inspect.signature(getattr(nnx, self.name).__init__).parameters
        given = taken.get(self.renames.get(field, field))
        own = [f.default for f in dataclasses.fields(cls) if f.name == field]  # pyright: ignore
        nothing = (None, inspect.Parameter.empty)
        return own == [None] and given is not None and given.default not in nothing


def leaf(variables: Any, *names: str) -> Any:
    """A leaf's shape below a module's own variables, None if there is none."""
    for collection in variables.values():
        found = collection
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None and not isinstance(found, Mapping):
            return tuple(meta.unbox(found).shape)
    return None


def _first_shape(instance: Instance) -> tuple[int, ...] | None:
    for call in instance.calls:
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, Shape):
                return value.shape
    return None


def _last(instance: Instance, variables: Any) -> Any:
    shape = _first_shape(instance)
    return None if shape is None else shape[-1]


def _kernel(index: int) -> Callable[[Instance, Any], Any]:
    def size(instance: Instance, variables: Any) -> Any:
        shape = leaf(variables, "kernel")
        return None if shape is None else shape[index]

    return size


def _conv(instance: Instance, variables: Any) -> Any:
    shape = leaf(variables, "kernel")
    if shape is None:
        return None
    return shape[-2] * instance.fields.get("feature_group_count", 1)


def _transposed(instance: Instance, variables: Any) -> Any:
    shape = leaf(variables, "kernel")
    if shape is None:
        return None
    return shape[-1] if instance.fields.get("transpose_kernel") else shape[-2]


def _bias(instance: Instance, variables: Any) -> Any:
    return leaf(variables, "bias")


def _norm(instance: Instance, variables: Any) -> Any:
    for name in ("scale", "bias", "mean"):
        shape = leaf(variables, name)
        if shape is not None:
            return shape[0] if len(shape) == 1 else None
    return _last(instance, variables)


def _general(instance: Instance, variables: Any) -> Any:
    shape = _first_shape(instance)
    if shape is None:
        return None
    axis = instance.fields["axis"]
    if isinstance(axis, int):
        return shape[axis]
    return tuple(shape[each] for each in axis)


def _query(instance: Instance, variables: Any) -> Any:
    shape = leaf(variables, "query", "kernel")
    return None if shape is None else shape[0]


def _key(instance: Instance, variables: Any) -> Any:
    shape, query = leaf(variables, "key", "kernel"), leaf(variables, "query", "kernel")
    return None if shape is None or query is None or shape[0] == query[0] else shape[0]


def _cell(name: str, axis: int = 0) -> Callable[[Instance, Any], Any]:
    def size(instance: Instance, variables: Any) -> Any:
        shape = leaf(variables, name, "kernel")
        return None if shape is None else shape[axis]

    return size


_NORM = {"sizes": {"num_features": _norm}, "positional": ("num_features",)}
_ATTENTION: dict[str, Any] = {
    "sizes": {"in_features": _query, "in_kv_features": _key},
    "positional": ("num_heads", "in_features", "qkv_features", "out_features"),
    "modes": ("deterministic",),
    "extra": {"decode": "False"},
    "optional": ("in_kv_features",),
    "unsupported": (
        "force_fp32_for_softmax",
        "qkv_dot_general_cls",
        "out_dot_general_cls",
        "qk_attn_weights_einsum_cls",
        "attn_weights_value_einsum_cls",
    ),
}


def _recurrent(name: str, gate: str) -> Layer:
    return Layer(
        name,
        {"in_features": _cell(gate)},
        {"features": "hidden_features"},
        ("in_features", "hidden_features"),
        carried={"features": _cell(gate, -1)},
    )


LAYERS: Mapping[type, Layer] = {
    nn.Dense: Layer(
        "Linear",
        {"in_features": _kernel(0)},
        {"features": "out_features"},
        ("in_features", "out_features"),
        unsupported=("dot_general_cls",),
    ),
    nn.DenseGeneral: Layer(
        "LinearGeneral",
        {"in_features": _general},
        {"features": "out_features"},
        ("in_features", "out_features"),
        unsupported=("dot_general_cls", "batch_dims"),
    ),
    nn.Einsum: Layer(
        "Einsum",
        {"bias_shape": _bias},
        {"shape": "kernel_shape"},
        ("einsum_str", "kernel_shape", "bias_shape"),
        dropped=("use_bias",),
        needed=("einsum_str",),
        optional=("bias_shape",),
    ),
    nn.Conv: Layer(
        "Conv",
        {"in_features": _conv},
        {"features": "out_features"},
        ("in_features", "out_features", "kernel_size", "strides"),
        unsupported=("conv_general_dilated_cls",),
    ),
    nn.ConvTranspose: Layer(
        "ConvTranspose",
        {"in_features": _transposed},
        {"features": "out_features"},
        ("in_features", "out_features", "kernel_size", "strides"),
    ),
    nn.Embed: Layer("Embed", positional=("num_embeddings", "features")),
    nn.BatchNorm: Layer(
        "BatchNorm",
        **_NORM,
        modes=("use_running_average",),
        call=("x", "use_running_average"),
        keep=1,
        unsupported=("force_float32_reductions",),
    ),
    nn.LayerNorm: Layer("LayerNorm", **_NORM, unsupported=("force_float32_reductions",)),
    nn.RMSNorm: Layer("RMSNorm", **_NORM, unsupported=("force_float32_reductions",)),
    nn.GroupNorm: Layer(
        "GroupNorm",
        {"num_features": _last},
        {},
        ("num_features", "num_groups"),
        unsupported=("force_float32_reductions",),
    ),
    nn.InstanceNorm: Layer(
        "InstanceNorm",
        {"num_features": _last},
        {},
        ("num_features",),
        unsupported=("force_float32_reductions",),
    ),
    nn.Dropout: Layer(
        "Dropout",
        positional=("rate",),
        modes=("deterministic",),
        call=("inputs", "deterministic", "rng"),
        keep=1,
    ),
    nn.MultiHeadDotProductAttention: Layer("MultiHeadAttention", **_ATTENTION),
    nn.MultiHeadAttention: Layer("MultiHeadAttention", **_ATTENTION),
    nn.SelfAttention: Layer(
        "MultiHeadAttention", **_ATTENTION, call=("inputs_q", "mask", "deterministic"), keep=1
    ),
    nn.PReLU: Layer("PReLU", positional=("negative_slope_init",), rngs=False),
    nn.LSTMCell: _recurrent("LSTMCell", "ii"),
    nn.OptimizedLSTMCell: _recurrent("OptimizedLSTMCell", "ii"),
    nn.SimpleCell: _recurrent("SimpleCell", "i"),
    nn.RNN: Layer(
        "RNN",
        positional=("cell",),
        unsupported=("variable_axes", "variable_broadcast", "variable_carry", "split_rngs"),
    ),
    nn.Bidirectional: Layer("Bidirectional", positional=("forward_rnn", "backward_rnn")),
    nn.Sequential: Layer("Sequential", rngs=False),
}
"""Layers that are rewritten, by the Linen class."""


def layer_of(cls: type | None) -> Layer | None:
    """The counterpart of a class, None if it is no layer of Flax that is rewritten."""
    return None if cls is None else LAYERS.get(cls)


def field_order(cls: type) -> list[str]:
    """The names of the fields of a Linen class, as its constructor takes them by position."""
    return [
        field.name
        for field in dataclasses.fields(cls)  # pyright: ignore
        if field.init and not field.kw_only
    ]
