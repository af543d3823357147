"""Models whose arrays are laid out otherwise in NNX, with rules and the same done by hand."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)


def attend(q, k, v):
    """Attention with two heads, of projections without an axis of heads."""
    heads = [x.reshape(*x.shape[:-1], -1, 4) for x in (q, k, v)]
    most = heads[0].shape[-2]
    return nn.dot_product_attention(
        heads[0], *(jnp.repeat(x, most // x.shape[-2], -2) for x in heads[1:])
    ).reshape(q.shape)


class WithHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, name="attn")(x)


class Fused(nn.Module):
    """One projection for queries, keys and values, and statistics of all of them."""

    query: int = 8
    key: int = 8

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.query + 2 * self.key, name="qkv")(x)
        x = nn.BatchNorm(use_running_average=True, name="norm")(x)
        q, k, v = jnp.split(x, [self.query, self.query + self.key], -1)
        return nn.Dense(8, name="out")(attend(q, k, v))


class FusedInHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((3, 2, 4), name="qkv")(x)
        q, k, v = (x[..., n, :, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


class Interleaved(nn.Module):
    """As in GPT-NeoX: each head has its query, key and value side by side."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(24, name="qkv")(x).reshape(*x.shape[:2], 2, 3, 4)
        q, k, v = (x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


class InterleavedInHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 3, 4), name="qkv")(x)
        q, k, v = (x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


class InterleavedGroups(nn.Module):
    """As in Falcon: two groups of two queries that share a key and a value."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="qkv")(x).reshape(*x.shape[:2], 2, 4, 4)
        q, k, v = (
            x[..., part, :].reshape(*x.shape[:2], -1)
            for part in (slice(0, 2), slice(2, 3), slice(3, 4))
        )
        return nn.Dense(8, name="out")(attend(q, k, v))


class InterleavedConv1D(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Conv1D(24, name="qkv")(x).reshape(*x.shape[:2], 2, 3, 4)
        q, k, v = (x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


class Conv1D(nn.Module):
    """As in the GPT-2 of Hugging Face: a kernel with its outputs first."""

    features: int

    @nn.compact
    def __call__(self, x):
        shape = (self.features, x.shape[-1])
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return x @ kernel.T + bias[None, None]


class Transposed(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(Conv1D(24, name="c_attn")(x), 3, -1)
        return Conv1D(8, name="c_proj")(attend(q, k, v))


class Separate(nnx.Module):
    def __init__(self, rngs, query=8, key=8, has_norms=False):
        self.q = nnx.Linear(8, query, rngs=rngs)
        self.k = nnx.Linear(8, key, rngs=rngs)
        self.v = nnx.Linear(8, key, rngs=rngs)
        if has_norms:
            kwargs = {"use_running_average": True, "rngs": rngs}
            self.norms = nnx.Dict(
                {n: nnx.BatchNorm(s, **kwargs) for n, s in (("q", query), ("k", key), ("v", key))}
            )
        self.has_norms = has_norms
        self.out = nnx.Linear(query, 8, rngs=rngs)

    def __call__(self, x):
        qkv = [self.q(x), self.k(x), self.v(x)]
        if self.has_norms:
            qkv = [self.norms[n](y) for n, y in zip("qkv", qkv, strict=True)]
        return self.out(attend(*qkv))


class Joined(nnx.Module):
    def __init__(self, rngs, key=8):
        self.qkv = nnx.Linear(8, 8 + 2 * key, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)
        self.key = key

    def __call__(self, x):
        return self.out(attend(*jnp.split(self.qkv(x), [8, 8 + self.key], -1)))


class JoinedInHeads(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(8, 24, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = self.qkv(x).reshape(*x.shape[:2], 2, 3, 4)
        return self.out(attend(*(y[..., n, :].reshape(x.shape) for n in range(3))))


class Apart(nn.Module):
    """Separate projections, of which keys and values may have fewer heads."""

    key: int = 8

    @nn.compact
    def __call__(self, x):
        q, k, v = (
            nn.Dense(size, name=name)(x)
            for name, size in (("query", 8), ("key", self.key), ("value", self.key))
        )
        return nn.Dense(8, name="out")(attend(q, k, v))


class Stacked(nn.Module):
    module: type = WithHeads
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            _Layer,
            variable_axes={"params": self.axis, "batch_stats": self.axis},
            split_rngs={"params": True},
            length=2,
        )
        return scan(self.module, name="layers")(x, None)[0]


class _Layer(nn.Module):
    module: type

    @nn.compact
    def __call__(self, x, _):
        return x + self.module(name="attn")(x), None


class OneByOne(nn.Module):
    """The same layers as `Stacked`, each with parameters of its own."""

    module: type
    is_named: bool = True

    @nn.compact
    def __call__(self, x):
        for n in range(2):
            x = _Layer(self.module, name=f"layer_{n}" if self.is_named else None)(x, None)[0]
        return x


class NativeStacked(nnx.Module):
    def __init__(self, rngs, make, axis=0):
        self.blocks = nnx.vmap(make, out_axes=axis)(rngs.split(2))
        self.axis = axis

    def __call__(self, x):
        def call(x, layer):
            return x + layer(x)

        scan = nnx.scan(call, in_axes=(nnx.Carry, self.axis), out_axes=nnx.Carry)
        return scan(x, self.blocks)


class List(nnx.Module):
    def __init__(self, rngs, make):
        self.layers = nnx.List([make(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


HEADS = {
    "attn/query": "q reshape",
    "attn/key": "k reshape",
    "attn/value": "v reshape",
    "attn/out": "out reshape",
}


def by_hand_heads(p):
    p = p["attn"]
    names = {"q": "query", "k": "key", "v": "value"}
    found = {n: (p[m]["kernel"].reshape(8, 8), p[m]["bias"].reshape(8)) for n, m in names.items()}
    return {**found, "out": (p["out"]["kernel"].reshape(8, 8), p["out"]["bias"])}


def by_hand_split(p, sizes=(8, 8, 8)):
    q, k, _ = sizes
    cuts = [q, q + k]
    kernels = np.split(p["qkv"]["kernel"], cuts, 1)
    biases = np.split(p["qkv"]["bias"], cuts)
    return dict(zip("qkv", zip(kernels, biases, strict=True), strict=True))


def by_hand_in_heads(p):
    kernel, bias = p["qkv"]["kernel"], p["qkv"]["bias"]
    return {n: (kernel[:, i].reshape(8, 8), bias[i].reshape(8)) for i, n in enumerate("qkv")}


def by_hand_interleaved(p, parts=((0, 1), (1, 2), (2, 3)), axis=1):
    kernel, bias = np.asarray(p["qkv"]["kernel"]), np.asarray(p["qkv"]["bias"]).reshape(-1)
    kernel = np.moveaxis(kernel, 0, 1) if axis == 0 else kernel.reshape(8, -1)
    total = parts[-1][1]
    return {
        name: (
            kernel.reshape(8, 2, total, 4)[:, :, a:b].reshape(8, -1),
            bias.reshape(2, total, 4)[:, a:b].reshape(-1),
        )
        for name, (a, b) in zip("qkv", parts, strict=True)
    }


def by_hand_transposed(p):
    kernel, bias = p["c_attn"]["kernel"], p["c_attn"]["bias"]
    parts = {n: (kernel[8 * i : 8 * i + 8].T, bias[8 * i : 8 * i + 8]) for i, n in enumerate("qkv")}
    return {**parts, "out": (p["c_proj"]["kernel"].T, p["c_proj"]["bias"])}


def by_hand_join(p):
    own = [p[name] for name in ("query", "key", "value")]
    return {
        "qkv": (
            np.concatenate([each["kernel"] for each in own], 1),
            np.concatenate([each["bias"] for each in own]),
        )
    }


def by_hand_join_in_heads(p):
    own = [p[name] for name in ("query", "key", "value")]
    kernels = np.stack([each["kernel"].reshape(8, 2, 4) for each in own], 2)
    biases = np.stack([each["bias"].reshape(2, 4) for each in own], 1)
    return {"qkv": (kernels.reshape(8, 24), biases.reshape(24))}


CASES = {
    "heads to features": (WithHeads(), Separate, HEADS, by_hand_heads),
    "fused to separate": (
        Fused(),
        lambda rngs: Separate(rngs, has_norms=True),
        {"qkv": "{q,k,v}", "norm": "norms.{q,k,v}"},
        by_hand_split,
    ),
    "fused to separate of several sizes": (
        Fused(8, 4),
        lambda rngs: Separate(rngs, 8, 4, has_norms=True),
        {"qkv": "{q,k,v}", "norm": "norms.{q,k,v}"},
        lambda p: by_hand_split(p, (8, 4, 4)),
    ),
    "fused in heads to separate": (
        FusedInHeads(),
        Separate,
        {"qkv": "{q,k,v@-3} reshape"},
        by_hand_in_heads,
    ),
    "fused and transposed to separate": (
        Transposed(),
        Separate,
        {"c_attn": "{q,k,v@0} transpose", "c_proj": "out transpose"},
        by_hand_transposed,
    ),
    "separate to fused": (Apart(), Joined, {"{query,key,value}": "qkv"}, by_hand_join),
    "separate of several sizes to fused": (
        Apart(4),
        lambda rngs: Joined(rngs, 4),
        {"{query,key,value}": "qkv"},
        by_hand_join,
    ),
}


# What shapes do not tell, and the way in which a model takes the axis apart does.
INTERLEAVED = {
    "q, k and v in each head": (
        Interleaved(),
        Separate,
        {"qkv": "{2x q,k,v}"},
        by_hand_interleaved,
    ),
    "q, k and v in each head, with axes for both": (
        InterleavedInHeads(),
        Separate,
        {"qkv": "{q,k,v@-2} reshape"},
        by_hand_interleaved,
    ),
    "q, k and v in each group of heads": (
        InterleavedGroups(),
        lambda rngs: Separate(rngs, 16, 8),
        {"qkv": "{2x q,k,v}"},
        lambda p: by_hand_interleaved(p, ((0, 2), (2, 3), (3, 4))),
    ),
    "q, k and v in each head, transposed": (
        InterleavedConv1D(),
        Separate,
        {"qkv": "{2x q,k,v@0} transpose"},
        lambda p: by_hand_interleaved(p, axis=0),
    ),
    "separate to q, k and v in each head": (
        Apart(),
        JoinedInHeads,
        {"{2x query,key,value}": "qkv"},
        by_hand_join_in_heads,
    ),
}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="ln_1")(x)
        q, k, v = jnp.split(Conv1D(24, name="c_attn")(y), 3, -1)
        x = x + Conv1D(8, name="c_proj")(attend(q, k, v))
        y = nn.gelu(Conv1D(32, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        return x + Conv1D(8, name="c_proj_2")(y)


class LinenGPT(nn.Module):
    """Blocks as Hugging Face lays them out."""

    @nn.compact
    def __call__(self, x):
        for n in range(3):
            x = LinenBlock(name=f"h_{n}")(x)
        return nn.Dense(5, name="lm_head")(x)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Conv1D(8, name="c_proj")(nn.gelu(Conv1D(32, name="c_fc")(x)))


class HuggingFaceBlock(nn.Module):
    def setup(self):
        self.ln_1, self.ln_2 = nn.LayerNorm(), nn.LayerNorm()
        self.attn, self.mlp = Transposed(), LinenMLP()

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class HuggingFaceBlocks(nn.Module):
    def setup(self):
        self.blocks = [HuggingFaceBlock(name=str(n)) for n in range(2)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class HuggingFaceGPT(nn.Module):
    """The GPT-2 of Hugging Face: `h/0/attn/c_attn/kernel`, with outputs first, and tied."""

    def setup(self):
        self.wte, self.wpe = nn.Embed(6, 8), nn.Embed(3, 8)
        self.h, self.ln_f = HuggingFaceBlocks(), nn.LayerNorm()

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])[None])
        return self.wte.attend(self.ln_f(self.h(x)))


class GeneralAttention(nnx.Module):
    def __init__(self, rngs):
        self.q, self.k, self.v = (nnx.LinearGeneral(8, (2, 4), rngs=rngs) for _ in range(3))
        self.o = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        qkv = (layer(x).reshape(x.shape) for layer in (self.q, self.k, self.v))
        return self.o(attend(*qkv).reshape(*x.shape[:-1], 2, 4))


class TiedGPT(nnx.Module):
    def __init__(self, rngs, attention, is_stacked):
        def make(rngs):
            return NativeBlock(rngs, attention)

        self.tokens, self.positions = nnx.Embed(6, 8, rngs=rngs), nnx.Embed(3, 8, rngs=rngs)
        stack = nnx.vmap(make)
        self.layers = stack(rngs.split(2)) if is_stacked else nnx.List([make(rngs), make(rngs)])
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.is_stacked = is_stacked

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        if self.is_stacked:
            scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = scan(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.tokens.attend(self.norm(x))


class NativeAttention(nnx.Module):
    def __init__(self, rngs):
        self.q, self.k, self.v, self.o = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class NativeBlock(nnx.Module):
    def __init__(self, rngs, attention=NativeAttention):
        self.norm1, self.norm2 = (nnx.LayerNorm(8, rngs=rngs) for _ in range(2))
        self.attention = attention(rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NativeGPT(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NativeBlock(rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
