"""Models of well-known architectures twice, in Linen and in NNX with other names for the layers.

In each of them some layers have the same shapes and could be exchanged.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

W = 8


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model twice.

    Attributes:
      linen: the Linen module.
      native: makes the NNX model.
      inputs: of both.
      linen_kwargs: keyword arguments of the Linen call.
    """

    linen: nn.Module
    native: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[Any, ...]
    linen_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def apply(self, variables, *inputs):
        return self.linen.apply(variables, *inputs, **self.linen_kwargs)

    def shapes(self):
        key = jax.random.key(0)
        return jax.eval_shape(lambda: self.linen.init(key, *self.inputs, **self.linen_kwargs))


TOKENS = jnp.asarray([[1, 4, 2, 0], [3, 3, 5, 1]])
IMAGE = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 8, 3)), jnp.float32)


# A GPT whose MLP is as wide as the model, so that six of the layers of a block have one shape.
class LinenGPTBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="ln_1")(x)
        q, k, v = (nn.Dense(W, name=f"attn_{n}")(y) for n in ("query", "key", "value"))
        scores = jnp.tril(jnp.ones((1, *(x.shape[1],) * 2))) * jnp.einsum("bqd,bkd->bqk", q, k)
        x = x + nn.Dense(W, name="attn_out")(scores @ v)
        y = nn.LayerNorm(name="ln_2")(x)
        # The outer layer is constructed first, so it is Dense_0.
        return x + nn.Dense(W)(nn.gelu(nn.Dense(W)(y)))


class LinenGPT(nn.Module):
    depth: int = 3

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(6, W, name="wte")(tokens)
        x = x + self.param("wpe", nn.initializers.normal(), (1, tokens.shape[1], W))
        for i in range(self.depth):
            x = LinenGPTBlock(name=f"h_{i}")(x)
        return nn.Dense(6, name="lm_head")(nn.LayerNorm(name="ln_f")(x))


class GPTBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(W, rngs=rngs)
        self.v_proj = nnx.Linear(W, W, rngs=rngs)
        self.k_proj = nnx.Linear(W, W, rngs=rngs)
        self.q_proj = nnx.Linear(W, W, rngs=rngs)
        self.o_proj = nnx.Linear(W, W, rngs=rngs)
        self.norm2 = nnx.LayerNorm(W, rngs=rngs)
        self.expand = nnx.Linear(W, W, rngs=rngs)
        self.contract = nnx.Linear(W, W, rngs=rngs)

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        scores = jnp.tril(jnp.ones((1, *(x.shape[1],) * 2))) * jnp.einsum("bqd,bkd->bqk", q, k)
        x = x + self.o_proj(scores @ v)
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs, depth=3):
        self.token_embedding = nnx.Embed(6, W, rngs=rngs)
        self.position_embedding = nnx.Param(jnp.zeros((1, 4, W)))
        self.blocks = nnx.List([GPTBlock(rngs) for _ in range(depth)])
        self.final_norm = nnx.LayerNorm(W, rngs=rngs)
        self.head = nnx.Linear(W, 6, rngs=rngs)

    def __call__(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


class LinenScannedGPT(nn.Module):
    depth: int = 3

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(6, W, name="wte")(tokens)
        x = x + self.param("wpe", nn.initializers.normal(), (1, tokens.shape[1], W))
        scan = nn.scan(
            lambda block, carry, _: (block(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        x, _ = scan(LinenGPTBlock(name="h"), x, None)
        return nn.Dense(6, name="lm_head")(nn.LayerNorm(name="ln_f")(x))


# A ResNet with BatchNorm, in which all convolutions of a stage have one shape.
class LinenResidual(nn.Module):
    width: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train):
        conv = lambda **kw: nn.Conv(self.width, (3, 3), use_bias=False, **kw)  # noqa: E731
        norm = lambda: nn.BatchNorm(use_running_average=not train)  # noqa: E731
        y = nn.relu(norm()(conv(strides=self.strides)(x)))
        y = norm()(conv()(y))
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), strides=self.strides, name="conv_proj")(x)
            x = nn.BatchNorm(use_running_average=not train, name="norm_proj")(x)
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3), use_bias=False, name="conv_init")(x)
        x = nn.BatchNorm(use_running_average=not train, name="bn_init")(x)
        for width, strides in ((4, 1), (4, 1), (6, 2)):
            x = LinenResidual(width, strides)(x, train)
        return nn.Dense(5)(x.mean((1, 2)))


class Residual(nnx.Module):
    def __init__(self, before, width, strides, rngs):
        kwargs = {"use_bias": False, "rngs": rngs}
        self.conv1 = nnx.Conv(before, width, (3, 3), strides=strides, **kwargs)
        self.bn1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), **kwargs)
        self.bn2 = nnx.BatchNorm(width, rngs=rngs)
        self.shortcut = nnx.data(None)
        if before != width or strides != 1:
            self.shortcut = nnx.Conv(before, width, (1, 1), strides=strides, rngs=rngs)
            self.shortcut_bn = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut_bn(self.shortcut(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs)
        self.stem_bn = nnx.BatchNorm(4, rngs=rngs)
        shapes = ((4, 4, 1), (4, 4, 1), (4, 6, 2))
        self.stages = nnx.List([Residual(*shape, rngs) for shape in shapes])
        self.classifier = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem_bn(self.stem(x))
        for block in self.stages:
            x = block(x)
        return self.classifier(x.mean((1, 2)))


# An encoder and a decoder, whose attentions all have one shape.
class LinenEncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(W)(nn.relu(nn.Dense(6)(nn.LayerNorm()(x))))


class LinenDecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, encoded):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), encoded)
        return x + nn.Dense(W)(nn.relu(nn.Dense(6)(nn.LayerNorm()(x))))


class LinenTranslator(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        shared = nn.Embed(6, W, name="shared_embedding")
        x, y = shared(source), shared(target)
        for i in range(2):
            x = LinenEncoderLayer(name=f"encoder_layer_{i}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x)
        for i in range(2):
            y = LinenDecoderLayer(name=f"decoder_layer_{i}")(y, x)
        return nn.Dense(6)(nn.LayerNorm(name="decoder_norm")(y))


def _attention(rngs):
    return nnx.MultiHeadAttention(2, W, decode=False, rngs=rngs)


class EncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.norm_attn = _attention(rngs), nnx.LayerNorm(W, rngs=rngs)
        self.norm_ffn = nnx.LayerNorm(W, rngs=rngs)
        self.ffn = nnx.Sequential(
            nnx.Linear(W, 6, rngs=rngs), nnx.relu, nnx.Linear(6, W, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.self_attn(self.norm_attn(x))
        return x + self.ffn(self.norm_ffn(x))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.cross_attn, self.self_attn = _attention(rngs), _attention(rngs)
        self.norm_self, self.norm_cross, self.norm_ffn = (
            nnx.LayerNorm(W, rngs=rngs) for _ in range(3)
        )
        self.ffn = nnx.Sequential(
            nnx.Linear(W, 6, rngs=rngs), nnx.relu, nnx.Linear(6, W, rngs=rngs)
        )

    def __call__(self, x, encoded):
        x = x + self.self_attn(self.norm_self(x))
        x = x + self.cross_attn(self.norm_cross(x), encoded, encoded)
        return x + self.ffn(self.norm_ffn(x))


class Translator(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(6, W, rngs=rngs)
        self.decoder = nnx.List([DecoderLayer(rngs) for _ in range(2)])
        self.encoder = nnx.List([EncoderLayer(rngs) for _ in range(2)])
        self.dec_norm, self.enc_norm = nnx.LayerNorm(W, rngs=rngs), nnx.LayerNorm(W, rngs=rngs)
        self.logits = nnx.Linear(W, 6, rngs=rngs)

    def __call__(self, source, target):
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        x = self.enc_norm(x)
        for layer in self.decoder:
            y = layer(y, x)
        return self.logits(self.dec_norm(y))


# Two LSTMs of one shape, and a projection before each.
class LinenTagger(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(6, W)(tokens)
        for _ in range(2):
            x = nn.tanh(nn.Dense(W)(x))
            x = nn.RNN(nn.OptimizedLSTMCell(W))(x)
        return nn.Dense(3)(x)


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(6, W, rngs=rngs)
        self.project = nnx.List([nnx.Linear(W, W, rngs=rngs) for _ in range(2)])
        self.lower = nnx.RNN(nnx.OptimizedLSTMCell(W, W, rngs=rngs), rngs=rngs)
        self.upper = nnx.RNN(nnx.OptimizedLSTMCell(W, W, rngs=rngs), rngs=rngs)
        self.tags = nnx.Linear(W, 3, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens)
        for project, rnn in zip(self.project, (self.lower, self.upper), strict=True):
            x = rnn(nnx.tanh(project(x)))
        return self.tags(x)


# A ViT with parameters of its own, all layers in one flat compact method.
class LinenViT(nn.Module):
    @nn.compact
    def __call__(self, image):
        x = nn.Conv(W, (4, 4), strides=4, name="embedding")(image).reshape(2, 4, W)
        cls = self.param("cls", nn.initializers.normal(), (1, 1, W))
        x = jnp.concatenate([jnp.tile(cls, (2, 1, 1)), x], 1)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, 5, W))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            x = x + nn.Dense(W)(nn.gelu(nn.Dense(W)(nn.LayerNorm()(x))))
        return nn.Dense(5, name="head")(nn.LayerNorm()(x)[:, 0])


class ViTLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention, self.before = _attention(rngs), nnx.LayerNorm(W, rngs=rngs)
        self.between = nnx.LayerNorm(W, rngs=rngs)
        self.fc1, self.fc2 = (nnx.Linear(W, W, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(self.before(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.between(x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, W, (4, 4), strides=4, rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, W)))
        self.positions = nnx.Param(jnp.zeros((1, 5, W)))
        self.encoder = nnx.List([ViTLayer(rngs) for _ in range(2)])
        self.norm, self.classifier = nnx.LayerNorm(W, rngs=rngs), nnx.Linear(W, 5, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image).reshape(2, 4, W)
        x = jnp.concatenate([jnp.tile(self.cls_token[...], (2, 1, 1)), x], 1)
        x = x + self.positions[...]
        for layer in self.encoder:
            x = layer(x)
        return self.classifier(self.norm(x)[:, 0])


# A U-Net: what goes up has the shapes of what goes down.
class LinenUNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        down1 = nn.relu(nn.Conv(3, (3, 3))(x))
        down2 = nn.relu(nn.Conv(3, (3, 3))(down1))
        middle = nn.Conv(3, (3, 3), name="bottleneck")(down2)
        up = nn.relu(nn.Conv(3, (3, 3))(middle) + down2)
        return nn.Conv(3, (1, 1))(nn.relu(nn.Conv(3, (3, 3))(up) + down1))


class UNet(nnx.Module):
    def __init__(self, rngs):
        conv = lambda: nnx.Conv(3, 3, (3, 3), rngs=rngs)  # noqa: E731
        self.ups = nnx.List([conv(), conv()])
        self.downs = nnx.List([conv(), conv()])
        self.mid = conv()
        self.final = nnx.Conv(3, 3, (1, 1), rngs=rngs)

    def __call__(self, x):
        first = nnx.relu(self.downs[0](x))
        second = nnx.relu(self.downs[1](first))
        x = nnx.relu(self.ups[0](self.mid(second)) + second)
        return self.final(nnx.relu(self.ups[1](x) + first))


ARCHITECTURES = {
    "GPT": Architecture(LinenGPT(), GPT, (TOKENS,)),
    "scanned GPT": Architecture(LinenScannedGPT(), GPT, (TOKENS,)),
    "ResNet": Architecture(LinenResNet(), ResNet, (IMAGE,), {"train": False}),
    "encoder-decoder": Architecture(LinenTranslator(), Translator, (TOKENS, TOKENS[:, ::-1])),
    "LSTM": Architecture(LinenTagger(), Tagger, (TOKENS,)),
    "ViT": Architecture(LinenViT(), ViT, (IMAGE,)),
    "U-Net": Architecture(LinenUNet(), UNet, (IMAGE[:1],)),
}
