"""Layers whose NNX counterparts want something else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class DensePositional(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, False, jnp.float32)(x)


class DenseGeneralDefault(nn.Module):
    """`dot_general=None` is the default in Linen and another thing in NNX."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dot_general=None)(x)


class DenseOwnGeneral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dot_general=jax.lax.dot_general)(x)


class DenseGeneralAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 3), axis=-1)(x)
        return nn.DenseGeneral(4, axis=(-2, -1))(x)


class Einsums(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((4, 2, 3), "bti,ihd->bthd")(x)
        return nn.Einsum((2, 3, 4), "bthd,hdo->bto", use_bias=False)(x)


class ConvForms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, 3)(x)
        x = nn.Conv(4, (3,), 1, "SAME")(x)
        x = nn.Conv(features=4, kernel_size=(3,), feature_group_count=2, use_bias=False)(x)
        return nn.ConvTranspose(4, (3,))(x)


class EmbedAttend(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(7, 4)
        y = embed(jnp.arange(6)[None].repeat(x.shape[0], 0) % 7)
        return embed.attend(y + x)[..., :4]


class EmbedHalf(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Embed(7, 4, dtype=jnp.bfloat16)(jnp.arange(6)[None].repeat(x.shape[0], 0) % 7)
        return x + y


class NormDefault(nn.Module):
    """`use_running_average` in the call alone"""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm()(x, use_running_average=not train)


class NormConstant(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x)


class NormTrains(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


class NormOptions(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, -1, 0.9, 1e-3, use_bias=False)(x)
        return nn.BatchNorm(
            use_running_average=not train, scale_init=nn.initializers.zeros, dtype=jnp.float32
        )(x)


class NormPositional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(1e-3)(x)
        x = nn.RMSNorm(1e-3)(x)
        x = nn.GroupNorm(2)(x)
        x = nn.GroupNorm(num_groups=None, group_size=2)(x)
        return nn.InstanceNorm(1e-3)(x)


class NormAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=-1)(x)


class DropPositional(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5)(x, not train)


class DropConstant(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(x)


class DropConstantRandom(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


class DropBroadcast(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, (1,), not train)(x)


class DropCollection(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, rng_collection="noise")(x, deterministic=not train)


class DropOwnKey(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5)(x, deterministic=not train, rng=jax.random.key(0))


class DropZero(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.0)(x, deterministic=False)


class PReLUs(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.PReLU()(x)
        return nn.PReLU(jnp.float32, 0.2)(x)


class StringDtype(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dtype="bfloat16", param_dtype="float32")(x)


class Functions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.swish(x) + nn.hard_tanh(x)
        x = nn.avg_pool(nn.max_pool(x, (1,), (1,)), (1,), (1,))
        return nn.Dense(4)(nn.one_hot(jnp.argmax(x, -1), 5) + nn.softmax(nn.gelu(x))[..., :1])


class SeqComprehension(nn.Module):
    sizes: tuple[int, ...] = (5, 4)

    def setup(self):
        self.net = nn.Sequential([nn.Dense(s) for s in self.sizes])

    def __call__(self, x):
        return self.net(x)


class SeqCompCompact(nn.Module):
    sizes: tuple[int, ...] = (5, 4)

    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(s) for s in self.sizes])(x)


class SeqCompTriple(nn.Module):
    sizes: tuple[int, ...] = (5, 7, 4)

    def setup(self):
        self.net = nn.Sequential([nn.Dense(s) for s in self.sizes])

    def __call__(self, x):
        return self.net(x)


class SeqLoop(nn.Module):
    sizes: tuple[int, ...] = (5, 7, 4)

    @nn.compact
    def __call__(self, x):
        layers = []
        for s in self.sizes:
            layers.append(nn.Dense(s, use_bias=False))
            layers.append(nn.relu)
        layers.append(nn.Dense(3))
        return nn.Sequential(layers)(x)


class SeqExtend(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(5), nn.tanh]
        for _ in range(self.depth):
            layers += [nn.Dense(6), nn.relu]
        if self.depth > 1:
            layers.extend([nn.LayerNorm()])
        net = nn.Sequential(layers)
        return net(x)


class SeqStar(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(5), nn.tanh]
        return nn.Sequential([*layers, nn.Dense(3)])(x)


class SeqSetupLoop(nn.Module):
    sizes: tuple[int, ...] = (5, 7, 4)

    def setup(self):
        layers = []
        for s in self.sizes:
            layers.append(nn.Dense(s))
            layers.append(nn.relu)
        self.net = nn.Sequential(layers)

    def __call__(self, x):
        return self.net(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = DensePositional()(x)
        x = DenseGeneralDefault()(x)
        x = DenseOwnGeneral()(x)
        x = DenseGeneralAxes()(x)
        x = Einsums()(x)
        x = ConvForms()(x)
        x = EmbedAttend()(x)
        x = EmbedHalf()(x)
        x = NormDefault()(x, train)
        x = NormConstant()(x)
        x = NormTrains()(x)
        x = NormOptions()(x, train)
        x = NormPositional()(x)
        x = NormAxes()(x)
        x = DropPositional()(x, train)
        x = DropConstant()(x)
        x = DropConstantRandom()(x)
        x = DropBroadcast()(x, train)
        x = DropCollection()(x, train)
        x = DropOwnKey()(x, train)
        x = DropZero()(x)
        x = PReLUs()(x)
        x = StringDtype()(x)
        x = Functions()(x)
        x = SeqComprehension()(x)
        x = SeqCompCompact()(x)
        x = SeqCompTriple()(x)
        x = SeqLoop()(x)
        x = SeqExtend()(x)
        x = SeqStar()(x)
        return SeqSetupLoop()(x)
