"""Fields, names, parameters and state where NNX does not do what Linen does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


class NoneThenLayer(nn.Module):
    with_head: bool = True

    def setup(self):
        self.head = None
        if self.with_head:
            self.head = nn.Dense(4)

    def __call__(self, x):
        return self.head(x) if self.head is not None else x


class AppendedLayers(nn.Module):
    def setup(self):
        layers = []
        for i in range(3):
            width = 4 + i
            layers.append(nn.Dense(width))
        self.layers = layers
        self.last = nn.Dense(4)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class NestedLists(nn.Module):
    def setup(self):
        self.blocks = [[nn.Dense(4), nn.Dense(4)] for _ in range(2)]

    def __call__(self, x):
        for row in self.blocks:
            for layer in row:
                x = layer(x)
        return x


class LoopNames(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(4, name=f"b_{i}")(x)
        for i in (3, 5):
            x = nn.Dense(4, name=f"c_{i}")(x)
        return x


class LoopIndexed(nn.Module):
    n: int = 2

    @nn.compact
    def __call__(self, x):
        keep = []
        for i in range(self.n):
            y = nn.Dense(4, name=f"down_{i}")(x)
            y = nn.LayerNorm(name=f"norm_{i}")(y)
            keep.append(y)
            x = nn.relu(y)
        for i in reversed(range(self.n)):
            x = nn.Dense(4, name=f"up_{i}")(x + keep.pop())
        return x


class ShadowedIterator(nn.Module):
    @nn.compact
    def __call__(self, x):
        it = x * 2
        layer = 1
        for _ in range(2):
            x = nn.Dense(4)(x) + it * layer
        return x


class ClashingNames(nn.Module):
    dense: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.dense)(x)
        x = nn.Dense(4, name="sow")(x)
        x = nn.Dense(4, name="eval")(x)
        x = nn.Dense(4, name="set_attributes")(x)
        return nn.Dense(4, name="iter_modules")(x)


class LocalClash(nn.Module):
    @nn.compact
    def __call__(self, x):
        net = nn.Dense(4, name="net_0")(x)
        for i in range(2):
            net = nn.Dense(4, name=f"net_{i + 1}")(net)
        return net


class NameExpression(nn.Module):
    prefix: str = "a"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name=self.prefix + "_head")(x)


class AutoNames(nn.Module):
    extra: bool = False

    @nn.compact
    def __call__(self, x):
        if self.extra:
            x = nn.Dense(4)(x)
        x = nn.Dense(4)(x)
        return nn.Dense(4)(nn.Dense(4)(x))


class ParamForms(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(0.1), (4,), jnp.float32)
        b = self.param("b", lambda key: jax.random.normal(key, (4,)))
        c = self.param("c", lambda key, shape: jnp.ones(shape), (x.shape[-1],))
        d = self.param("d", nn.initializers.zeros_init(), ())
        return jax.lax.add(x, jnp.broadcast_to(a * b * c, x.shape)) + d


class ParamLax(nn.Module):
    def setup(self):
        self.w = self.param("w", nn.initializers.ones, (4, 4))

    def __call__(self, x):
        return jax.lax.dot_general(x, self.w, (((2,), (0,)), ((), ())))


class ParamMethods(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (4, 4))
        return x @ w.T.astype(x.dtype).reshape(4, -1) + w[0]


class StateOwnCollection(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counters", "n", lambda: jnp.zeros((), jnp.float32))
        if not self.is_initializing():
            count.value = count.value + 1
        return x + count.value


class StateAugmented(nn.Module):
    @nn.compact
    def __call__(self, x):
        initialized = self.has_variable("batch_stats", "mean")
        mean = self.variable("batch_stats", "mean", lambda *s: jnp.zeros(s), x.shape[-1])
        if initialized:
            mean.value += 0.1 * x.mean((0, 1))
        return x - mean.value


class StateMutable(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (4,))
        if train and self.is_mutable_collection("batch_stats"):
            mean.value = mean.value * 0.9
        return x - mean.value


class SowClash(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4, name="h")(x)
        self.sow("intermediates", "h_out", y)
        self.sow("intermediates", "y", y)
        return y


class HasAttr(nn.Module):
    classes: int = 0

    def setup(self):
        self.body = nn.Dense(4)
        if self.classes:
            self.head = nn.Dense(self.classes)

    def __call__(self, x):
        x = self.body(x)
        if self.classes:
            x = self.head(x)
        return x


class EqualByChance(nn.Module):
    """6 tokens and 6 features"""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(6)(x)
        y = nn.Dense(y.shape[-1])(y.swapaxes(1, 2))
        return nn.Dense(4)(y)


class ModePartial(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        dense = functools.partial(nn.Dense, use_bias=False)
        x = norm(name="first")(dense(5)(x))
        return norm(epsilon=1e-3)(dense(4)(x))


class WalrusTernary(nn.Module):
    norm: bool = True

    @nn.compact
    def __call__(self, x):
        n = nn.LayerNorm() if self.norm else (lambda y: y)
        if (y := nn.Dense(4)(x)) is not None:
            y = n(y)
        return y


class GetAttrLoop(nn.Module):
    def setup(self):
        for i in range(2):
            setattr(self, f"layer_{i}", nn.Dense(4))

    def __call__(self, x):
        for i in range(2):
            x = getattr(self, f"layer_{i}")(x)
        return x


class DictField(nn.Module):
    kind: str = "a"

    @nn.compact
    def __call__(self, x):
        cls = {"a": nn.Dense, "b": nn.DenseGeneral}[self.kind]
        return cls(4)(x)


class Props(nn.Module):
    n: int = 2

    @property
    def width(self):
        return 2 * self.n

    @nn.nowrap
    def scaled(self, x):
        return x * self.width

    @nn.compact
    def __call__(self, x):
        return self.scaled(nn.Dense(self.width)(x))


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = NoneThenLayer()(x)
        x = AppendedLayers()(x)
        x = NestedLists()(x)
        x = LoopNames()(x)
        x = LoopIndexed()(x)
        x = ShadowedIterator()(x)
        x = ClashingNames()(x)
        x = LocalClash()(x)
        x = NameExpression()(x)
        x = AutoNames()(x)
        x = ParamForms()(x)
        x = ParamLax()(x)
        x = ParamMethods()(x)
        x = StateOwnCollection()(x)
        x = StateAugmented()(x)
        x = StateMutable()(x, train)
        x = SowClash()(x)
        x = HasAttr()(x)
        x = EqualByChance()(x)
        x = ModePartial()(x, train)
        x = WalrusTernary()(x)
        x = GetAttrLoop()(x)
        x = DictField()(x)
        return Props()(x)
