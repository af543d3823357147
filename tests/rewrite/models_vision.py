"""Vision models in the styles of Linen programs: compact, setup and nested forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class AddPosition(nn.Module):
    """Learned positions, with a parameter whose shape comes from the input."""

    init: Callable = nn.initializers.normal(stddev=0.02)

    @nn.compact
    def __call__(self, x):
        shape = (1, x.shape[1], x.shape[2])
        table = self.param("pos_embedding", self.init, shape)
        return x + table


class MlpBlock(nn.Module):
    mlp_dim: int
    out_dim: int | None = None
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, inputs, *, deterministic):
        actual_out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
        x = nn.Dense(features=self.mlp_dim)(inputs)
        x = nn.gelu(x)
        x = nn.Dropout(rate=self.dropout_rate)(x, deterministic=deterministic)
        output = nn.Dense(features=actual_out_dim)(x)
        return nn.Dropout(rate=self.dropout_rate)(output, deterministic=deterministic)


class Encoder1DBlock(nn.Module):
    mlp_dim: int
    num_heads: int
    dtype: Any = jnp.float32
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, inputs, *, deterministic):
        assert inputs.ndim == 3, f"Expected (batch, seq, hidden), got {inputs.shape}"
        x = nn.LayerNorm(dtype=self.dtype)(inputs)
        x = nn.MultiHeadDotProductAttention(
            dtype=self.dtype,
            kernel_init=nn.initializers.xavier_uniform(),
            broadcast_dropout=False,
            deterministic=deterministic,
            dropout_rate=self.dropout_rate,
            num_heads=self.num_heads,
        )(x, x)
        x = nn.Dropout(rate=self.dropout_rate)(x, deterministic=deterministic)
        x = x + inputs
        # The second half.
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = MlpBlock(mlp_dim=self.mlp_dim, dropout_rate=self.dropout_rate)(
            y, deterministic=deterministic
        )
        return x + y


class Encoder(nn.Module):
    num_layers: int
    mlp_dim: int
    num_heads: int
    add_position: bool = True

    @nn.compact
    def __call__(self, x, *, train):
        if self.add_position:
            x = AddPosition(name="posembed_input")(x)
            x = nn.Dropout(rate=0.1)(x, deterministic=not train)
        for lyr in range(self.num_layers):
            x = Encoder1DBlock(
                mlp_dim=self.mlp_dim, name=f"encoderblock_{lyr}", num_heads=self.num_heads
            )(x, deterministic=not train)
        return nn.LayerNorm(name="encoder_norm")(x)


class ViT(nn.Module):
    num_classes: int = 3
    patch: int = 4
    hidden_size: int = 8
    representation_size: int | None = 6
    classifier: str = "token"

    @nn.compact
    def __call__(self, inputs, *, train):
        x = inputs
        n, h, w, c = x.shape
        x = nn.Conv(
            features=self.hidden_size,
            kernel_size=(self.patch, self.patch),
            strides=(self.patch, self.patch),
            padding="VALID",
            name="embedding",
        )(x)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        if self.classifier == "token":
            cls = self.param("cls", nn.initializers.zeros, (1, 1, c))
            cls = jnp.tile(cls, [n, 1, 1])
            x = jnp.concatenate([cls, x], axis=1)
        x = Encoder(num_layers=2, mlp_dim=16, num_heads=2, name="Transformer")(x, train=train)
        if self.classifier == "token":
            x = x[:, 0]
        elif self.classifier == "gap":
            x = jnp.mean(x, axis=tuple(range(1, x.ndim - 1)))
        if self.representation_size is not None:
            x = nn.Dense(features=self.representation_size, name="pre_logits")(x)
            x = nn.tanh(x)
        if self.num_classes:
            x = nn.Dense(features=self.num_classes, name="head", kernel_init=nn.initializers.zeros)(
                x
            )
        return x


class MixerMlp(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.mlp_dim)(x)
        y = nn.gelu(y)
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = jnp.swapaxes(y, 1, 2)
        y = MixerMlp(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)
        x = x + y
        y = nn.LayerNorm()(x)
        return x + MixerMlp(self.channels_mlp_dim, name="channel_mixing")(y)


class Mixer(nn.Module):
    num_blocks: int = 2
    hidden_dim: int = 6

    @nn.compact
    def __call__(self, inputs):
        x = nn.Conv(self.hidden_dim, (4, 4), strides=(4, 4), name="stem")(inputs)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(self.num_blocks):
            x = MixerBlock(5, 7)(x)
        x = nn.LayerNorm(name="pre_head_layer_norm")(x)
        return nn.Dense(3, name="head")(x.mean(axis=1))


class ResidualUnit(nn.Module):
    """A unit whose projection depends on shapes; norm and convolution are fields."""

    filters: int
    conv: Any
    norm: Any
    act: Callable
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = self.norm()(y)
        y = self.act(y)
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(nn.Module):
    stage_sizes: Sequence[int]
    block_cls: Any
    num_filters: int = 4
    act: Callable = nn.relu
    conv: Any = nn.Conv

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(self.conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
        )
        x = conv(self.num_filters, (3, 3), (2, 2), name="conv_init")(x)
        x = norm(name="bn_init")(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, block_size in enumerate(self.stage_sizes):
            for j in range(block_size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = self.block_cls(
                    self.num_filters * 2**i, strides=strides, conv=conv, norm=norm, act=self.act
                )(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(3)(x)


TinyResNet = functools.partial(ResNet, stage_sizes=[1, 2], block_cls=ResidualUnit)


class DenseLayer(nn.Module):
    growth: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(num_groups=2)(x))
        y = nn.Conv(self.growth, (3, 3))(y)
        return jnp.concatenate([x, y], axis=-1)


class DenseNet(nn.Module):
    """Sizes that grow from layer to layer."""

    growth: int = 2
    blocks: tuple[int, ...] = (2, 1)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(2 * self.growth, (3, 3))(x)
        for index, count in enumerate(self.blocks):
            for _ in range(count):
                x = DenseLayer(self.growth)(x)
            if index < len(self.blocks) - 1:
                x = nn.Conv(x.shape[-1] // 2, (1, 1))(x)
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(3)(x.mean((1, 2)))


class ConvNextBlock(nn.Module):
    layer_scale: float = 1e-6

    @nn.compact
    def __call__(self, x):
        dim = x.shape[-1]
        y = nn.Conv(dim, (3, 3), feature_group_count=dim, name="dwconv")(x)
        y = nn.LayerNorm(epsilon=1e-6, name="norm")(y)
        y = nn.gelu(nn.Dense(4 * dim, name="pwconv1")(y))
        y = nn.Dense(dim, name="pwconv2")(y)
        if self.layer_scale > 0:
            gamma = self.param("gamma", nn.initializers.constant(self.layer_scale), (dim,))
            y = y * gamma
        return x + y


class ConvNext(nn.Module):
    dims: Sequence[int] = (4, 8)
    depths: Sequence[int] = (1, 2)

    def setup(self):
        self.stem = nn.Conv(self.dims[0], (2, 2), strides=(2, 2))
        self.down = [nn.Conv(dim, (2, 2), strides=(2, 2)) for dim in self.dims[1:]]
        stages = []
        for depth in self.depths:
            stages.append([ConvNextBlock() for _ in range(depth)])  # noqa: PERF401
        self.stages = stages
        self.head = nn.Dense(3)

    def __call__(self, x):
        x = self.stem(x)
        for index, blocks in enumerate(self.stages):
            if index:
                x = self.down[index - 1](x)
            for block in blocks:
                x = block(x)
        return self.head(x.mean((1, 2)))


class UNetBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, time):
        h = nn.Conv(self.features, (3, 3))(nn.swish(x))
        h = h + nn.Dense(self.features)(nn.swish(time))[:, None, None, :]
        if x.shape[-1] != self.features:
            x = nn.Dense(self.features, name="skip")(x)
        return x + h


class UNet(nn.Module):
    """Skip connections, a time embedding, transposed convolutions."""

    features: tuple[int, ...] = (4, 8)

    @nn.compact
    def __call__(self, x, t):
        time = nn.Dense(16)(t[:, None])
        time = nn.Dense(16)(nn.swish(time))
        x = nn.Conv(self.features[0], (3, 3), name="conv_in")(x)
        skips = []
        for size in self.features:
            x = UNetBlock(size)(x, time)
            skips.append(x)
            x = nn.Conv(size, (3, 3), strides=(2, 2))(x)
        x = UNetBlock(self.features[-1], name="middle")(x, time)
        for size in reversed(self.features):
            x = nn.ConvTranspose(size, (2, 2), strides=(2, 2))(x)
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            x = UNetBlock(size)(x, time)
        return nn.Conv(3, (3, 3), name="conv_out")(x)
