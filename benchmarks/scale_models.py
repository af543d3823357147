"""A decoder of billions of parameters: Linen and NNX, each native, wrapped and with half of both.

The layers are made by a scan, and every weight has logical axes. It is for initialisation alone:
there are no position embeddings and no causal mask, because they have no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

# Weights are sharded over both axes of the mesh, and layers are not.
AXES = ("fsdp", "tensor")
RULES = (
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("hidden", "tensor"),
    ("vocabulary", "tensor"),
    ("layers", None),
)
BATCH, LENGTH = 16, 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; the defaults are those of a model with 6.7 billion parameters."""

    depth: int = 32
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    vocabulary: int = 32000

    @property
    def weights(self) -> Mapping[str, tuple[int, int, tuple[str, str]]]:
        """The matrices of a layer: sizes, and the names of both axes."""
        inwards = (self.width, self.hidden, ("embed", "hidden"))
        attention = (self.width, self.width, ("embed", "heads"))
        return {
            "query": attention,
            "key": attention,
            "value": attention,
            "out": (self.width, self.width, ("heads", "embed")),
            "gate": inwards,
            "up": inwards,
            "down": (self.hidden, self.width, ("hidden", "embed")),
        }

    @property
    def parameters(self) -> int:
        """How many numbers there are."""
        layer = sum(rows * columns for rows, columns, _ in self.weights.values()) + 2 * self.width
        return self.depth * layer + 2 * self.vocabulary * self.width


def forward(x: Any, part: Callable[[str], Any], heads: int) -> Any:
    """A layer's output, from the submodules of its names."""
    normed = part("norm_1")(x)
    query, key, value = (
        part(name)(normed).reshape(*x.shape[:-1], heads, -1) for name in ("query", "key", "value")
    )
    mixed = nn.dot_product_attention(query, key, value)
    x = x + part("out")(mixed.reshape(x.shape))
    normed = part("norm_2")(x)
    return x + part("down")(nn.silu(part("gate")(normed)) * part("up")(normed))


_NORMAL, _ONES = nn.initializers.normal(0.02), nn.initializers.ones


class LinenLayer(nn.Module):
    """A decoder layer, as the body of a scan."""

    shape: Shape

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        """The layer's output, and nothing to be stacked."""

        def part(name: str) -> nn.Module:
            if name.startswith("norm"):
                scale = nn.with_logical_partitioning(_ONES, ("embed",))
                return nn.RMSNorm(scale_init=scale, name=name)
            _, columns, axes = self.shape.weights[name]
            return _linen_matrix(columns, axes, name)

        return forward(x, part, self.shape.heads), None


class NNXLayer(nnx.Module):
    """The NNX twin of `LinenLayer`."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        self.heads = shape.heads
        for name in ("norm_1", "norm_2"):
            scale = nnx.with_partitioning(_ONES, ("embed",))
            setattr(self, name, nnx.RMSNorm(shape.width, scale_init=scale, rngs=rngs))
        for name, (rows, columns, axes) in shape.weights.items():
            setattr(self, name, _nnx_matrix(rows, columns, axes, rngs))

    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        """The layer's output, and nothing to be stacked."""
        return forward(x, lambda name: getattr(self, name), self.heads), None


def _parts(shape: Shape, layer: Any) -> list[tuple[str, Any, int]]:
    """Name, layer and depth of each stack: one for each layer, of about the same depth."""
    layers = layer if isinstance(layer, tuple) else (layer,)
    names = ("layers", "layers_2")
    depths = [shape.depth // len(layers)] * (len(layers) - 1)
    depths.append(shape.depth - sum(depths))
    return list(zip(names, layers, depths, strict=False))


class LinenDecoder(nn.Module):
    """Layers of a Linen class, or half of them of another one, between embedding and head."""

    shape: Shape
    layer: Any

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """The logits."""
        shape = self.shape
        axes = nn.with_logical_partitioning(_NORMAL, ("vocabulary", "embed"))
        x = nn.Embed(shape.vocabulary, shape.width, embedding_init=axes, name="embed")(tokens)
        for part, layer, depth in _parts(shape, self.layer):
            layers = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=depth,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = layers(shape=shape, name=part)(x, None)
        return _linen_matrix(shape.vocabulary, ("embed", "vocabulary"), "head")(x)


def _stacked(shape: Shape, make_layer: Callable[..., Any], depth: int, rngs: nnx.Rngs) -> Any:
    @nnx.split_rngs(splits=depth)
    @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make_layers(rngs: nnx.Rngs) -> Any:
        return make_layer(shape, rngs=rngs)

    return make_layers(rngs)


class NNXDecoder(nnx.Module):
    """Layers that a function makes, or half of them another one, between embedding and head."""

    def __init__(self, shape: Shape, make_layer: Any, *, rngs: nnx.Rngs):
        axes = nnx.with_partitioning(_NORMAL, ("vocabulary", "embed"))
        self.embed = nnx.Embed(shape.vocabulary, shape.width, embedding_init=axes, rngs=rngs)
        for part, make, depth in _parts(shape, make_layer):
            setattr(self, part, _stacked(shape, make, depth, rngs))
        self.head = _nnx_matrix(shape.width, shape.vocabulary, ("embed", "vocabulary"), rngs)


def _linen_matrix(columns: int, axes: tuple[str, str], name: str) -> nn.Module:
    kernel_init = nn.with_logical_partitioning(_NORMAL, axes)
    return nn.Dense(columns, use_bias=False, kernel_init=kernel_init, name=name)


def _nnx_matrix(rows: int, columns: int, axes: tuple[str, str], rngs: nnx.Rngs) -> nnx.Module:
    kernel_init = nnx.with_partitioning(_NORMAL, axes)
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=kernel_init, rngs=rngs)


def _wrapped_linen_layer(shape: Shape, *, rngs: nnx.Rngs) -> nnx.Module:
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, shape.width), jnp.float32)
    return bridge.lazy_init(bridge.ToNNX(LinenLayer(shape), rngs=rngs), x, None)


def _linen(layer: Any) -> Callable[[Shape], Any]:
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return lambda shape: (LinenDecoder(shape, layer), (tokens,))


def _nnx(make_layer: Any) -> Callable[[Shape], Any]:
    return lambda shape: (lambda rngs: NNXDecoder(shape, make_layer, rngs=rngs), ())


# Each form as what `bridge.init_sharded` takes: what makes the model, and its inputs.
FORMS: Mapping[str, Callable[[Shape], tuple[Any, tuple[Any, ...]]]] = {
    "Linen": _linen(LinenLayer),
    "ToLinen": _linen(bridge.to_linen_class(NNXLayer)),
    "NNX": _nnx(NNXLayer),
    "ToNNX": _nnx(_wrapped_linen_layer),
    "mixed in Linen": _linen((LinenLayer, bridge.to_linen_class(NNXLayer))),
    "mixed in NNX": _nnx((_wrapped_linen_layer, NNXLayer)),
}
MIXED = ("mixed in Linen", "mixed in NNX")
# Each wrapped form and the native one that it is compared with.
NATIVE = {"ToLinen": "Linen", "ToNNX": "NNX", "mixed in Linen": "Linen", "mixed in NNX": "NNX"}
# 104 layers of the large one have 101.7 billion parameters.
SHAPES = {"": Shape(), "large": Shape(width=8192, hidden=28672, heads=64)}
