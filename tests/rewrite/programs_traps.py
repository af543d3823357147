"""Programs in which NNX does not do what Linen does, as text, each with what acts on it."""

from __future__ import annotations

import re
from typing import NamedTuple


class Trap(NamedTuple):
    """A program.

    Attributes:
        source: the program, without the imports of `programs.HEAD`; its last class is called.
        acted_on: what must stand in one of its new classes.
    """

    source: str
    acted_on: str = ""

    @property
    def classes(self) -> list[str]:
        """The names of its classes."""
        return re.findall(r"^class (\w+)", self.source, re.MULTILINE)


def together(traps: list[Trap]) -> str:
    """One program, whose class `Root` calls the traps in turn."""
    lines = ["class Root(nn.Module):", "    @nn.compact", "    def __call__(self, x, train=False):"]
    for trap in traps:
        train = ", train" if "x, train=False" in trap.source else ""
        lines.append(f"        x = {trap.classes[-1]}()(x{train})")
    lines.append("        return x")
    return "\n\n".join([*(trap.source for trap in traps), "\n".join(lines)])


# Layers whose NNX counterparts want something else.
LAYERS = [
    Trap(
        """
class DensePositional(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, False, jnp.float32)(x)
""",
        "use_bias=False, dtype=jnp.float32",
    ),
    Trap(
        """
class DenseGeneralDefault(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dot_general=None)(x)
""",
        "nnx.Linear(in_features, 4, rngs=rngs)",
    ),
    Trap(
        """
class DenseOwnGeneral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dot_general=jax.lax.dot_general)(x)
""",
    ),
    Trap(
        """
class DenseGeneralAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 3), axis=-1)(x)
        return nn.DenseGeneral(4, axis=(-2, -1))(x)
""",
        "nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs)",
    ),
    Trap(
        """
class Einsums(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((4, 2, 3), "bti,ihd->bthd")(x)
        return nn.Einsum((2, 3, 4), "bthd,hdo->bto", use_bias=False)(x)
""",
        'nnx.Einsum("bthd,hdo->bto", (2, 3, 4), rngs=rngs)',
    ),
    Trap(
        """
class ConvForms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, 3)(x)
        x = nn.Conv(4, (3,), 1, "SAME")(x)
        x = nn.Conv(features=4, kernel_size=(3,), feature_group_count=2, use_bias=False)(x)
        return nn.ConvTranspose(4, (3,))(x)
""",
        "nnx.Conv(4, 4, (3,), 1, padding=",
    ),
    Trap(
        """
class EmbedAttend(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(7, 4)
        y = embed(jnp.arange(6)[None].repeat(x.shape[0], 0) % 7)
        return embed.attend(y + x)[..., :4]
""",
    ),
    Trap(
        """
class EmbedHalf(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Embed(7, 4, dtype=jnp.bfloat16)(jnp.arange(6)[None].repeat(x.shape[0], 0) % 7)
        return x + y
""",
    ),
    Trap(
        """
class NormDefault(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm()(x, use_running_average=not train)
""",
    ),
    Trap(
        """
class NormConstant(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x)
""",
        "self.batch_norm(x, use_running_average=True)",
    ),
    Trap(
        """
class NormTrains(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)
""",
        "self.batch_norm(x, use_running_average=False)",
    ),
    Trap(
        """
class NormOptions(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, -1, 0.9, 1e-3, use_bias=False)(x)
        return nn.BatchNorm(
            use_running_average=not train, scale_init=nn.initializers.zeros, dtype=jnp.float32
        )(x)
""",
    ),
    Trap(
        """
class NormPositional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(1e-3)(x)
        x = nn.RMSNorm(1e-3)(x)
        x = nn.GroupNorm(2)(x)
        x = nn.GroupNorm(num_groups=None, group_size=2)(x)
        return nn.InstanceNorm(1e-3)(x)
""",
        "nnx.LayerNorm(in_features, epsilon=1e-3, rngs=rngs)",
    ),
    Trap(
        """
class NormAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=-1)(x)
""",
    ),
    Trap(
        """
class DropPositional(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5)(x, not train)
""",
        "self.dropout(x, deterministic=not train)",
    ),
    Trap(
        """
class DropConstant(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(x)
""",
        "self.dropout(x, deterministic=True)",
    ),
    Trap(
        """
class DropConstantRandom(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)
""",
        "self.dropout(x, deterministic=False)",
    ),
    Trap(
        """
class DropBroadcast(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, (1,), not train)(x)
""",
    ),
    Trap(
        """
class DropCollection(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, rng_collection="noise")(x, deterministic=not train)
""",
    ),
    Trap(
        """
class DropOwnKey(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5)(x, deterministic=not train, rng=jax.random.key(0))
""",
        "rngs=jax.random.key(0))",
    ),
    Trap(
        """
class DropZero(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.0)(x, deterministic=False)
""",
    ),
    Trap(
        """
class PReLUs(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.PReLU()(x)
        return nn.PReLU(jnp.float32, 0.2)(x)
""",
        "nnx.PReLU(0.2, param_dtype=jnp.float32)",
    ),
    Trap(
        """
class StringDtype(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dtype="bfloat16", param_dtype="float32")(x)
""",
    ),
    Trap(
        """
class Functions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.swish(x) + nn.hard_tanh(x)
        x = nn.avg_pool(nn.max_pool(x, (1,), (1,)), (1,), (1,))
        return nn.Dense(4)(nn.one_hot(jnp.argmax(x, -1), 5) + nn.softmax(nn.gelu(x))[..., :1])
""",
    ),
    Trap(
        """
class SeqComprehension(nn.Module):
    sizes: tuple[int, ...] = (5, 4)

    def setup(self):
        self.net = nn.Sequential([nn.Dense(s) for s in self.sizes])

    def __call__(self, x):
        return self.net(x)
""",
    ),
    Trap(
        """
class SeqCompCompact(nn.Module):
    sizes: tuple[int, ...] = (5, 4)

    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(s) for s in self.sizes])(x)
""",
        "*[nnx.Linear(",
    ),
    Trap(
        """
class SeqCompTriple(nn.Module):
    sizes: tuple[int, ...] = (5, 7, 4)

    def setup(self):
        self.net = nn.Sequential([nn.Dense(s) for s in self.sizes])

    def __call__(self, x):
        return self.net(x)
""",
    ),
    Trap(
        """
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
""",
        "layers.append(nnx.relu)",
    ),
    Trap(
        """
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
""",
        "layers += [nnx.Linear(features_in, 6, rngs=rngs), nnx.relu]",
    ),
    Trap(
        """
class SeqStar(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(5), nn.tanh]
        return nn.Sequential([*layers, nn.Dense(3)])(x)
""",
        "nnx.Sequential(*layers, nnx.Linear(5, 3, rngs=rngs))",
    ),
    Trap(
        """
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
""",
        "self.net = nnx.Sequential(*layers)",
    ),
]
# Fields, names, parameters and state.
NAMES = [
    Trap(
        """
class NoneThenLayer(nn.Module):
    with_head: bool = True

    def setup(self):
        self.head = None
        if self.with_head:
            self.head = nn.Dense(4)

    def __call__(self, x):
        return self.head(x) if self.head is not None else x
""",
        "self.head = nnx.data(None)",
    ),
    Trap(
        """
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
""",
        "self.layers = nnx.List(layers)",
    ),
    Trap(
        """
class NestedLists(nn.Module):
    def setup(self):
        self.blocks = [[nn.Dense(4), nn.Dense(4)] for _ in range(2)]

    def __call__(self, x):
        for row in self.blocks:
            for layer in row:
                x = layer(x)
        return x
""",
        "nnx.List([nnx.Linear(",
    ),
    Trap(
        """
class LoopNames(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(4, name=f"b_{i}")(x)
        for i in (3, 5):
            x = nn.Dense(4, name=f"c_{i}")(x)
        return x
""",
    ),
    Trap(
        """
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
""",
        "y = self.norm[i](y)",
    ),
    Trap(
        """
class ShadowedIterator(nn.Module):
    @nn.compact
    def __call__(self, x):
        it = x * 2
        layer = 1
        for _ in range(2):
            x = nn.Dense(4)(x) + it * layer
        return x
""",
    ),
    Trap(
        """
class ClashingNames(nn.Module):
    dense: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.dense)(x)
        x = nn.Dense(4, name="sow")(x)
        x = nn.Dense(4, name="eval")(x)
        x = nn.Dense(4, name="set_attributes")(x)
        return nn.Dense(4, name="iter_modules")(x)
""",
        "self.sow_layer = nnx.Linear(",
    ),
    Trap(
        """
class LocalClash(nn.Module):
    @nn.compact
    def __call__(self, x):
        net = nn.Dense(4, name="net_0")(x)
        for i in range(2):
            net = nn.Dense(4, name=f"net_{i + 1}")(net)
        return net
""",
        "self.net_0 = nnx.Linear(",
    ),
    Trap(
        """
class NameExpression(nn.Module):
    prefix: str = "a"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name=self.prefix + "_head")(x)
""",
    ),
    Trap(
        """
class AutoNames(nn.Module):
    extra: bool = False

    @nn.compact
    def __call__(self, x):
        if self.extra:
            x = nn.Dense(4)(x)
        x = nn.Dense(4)(x)
        return nn.Dense(4)(nn.Dense(4)(x))
""",
    ),
    Trap(
        """
class ParamForms(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(0.1), (4,), jnp.float32)
        b = self.param("b", lambda key: jax.random.normal(key, (4,)))
        c = self.param("c", lambda key, shape: jnp.ones(shape), (x.shape[-1],))
        d = self.param("d", nn.initializers.zeros_init(), ())
        return jax.lax.add(x, jnp.broadcast_to(a * b * c, x.shape)) + d
""",
    ),
    Trap(
        """
class ParamLax(nn.Module):
    def setup(self):
        self.w = self.param("w", nn.initializers.ones, (4, 4))

    def __call__(self, x):
        return jax.lax.dot_general(x, self.w, (((2,), (0,)), ((), ())))
""",
        "jax.lax.dot_general(x, self.w[...]",
    ),
    Trap(
        """
class ParamMethods(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (4, 4))
        return x @ w.T.astype(x.dtype).reshape(4, -1) + w[0]
""",
    ),
    Trap(
        """
class StateOwnCollection(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counters", "n", lambda: jnp.zeros((), jnp.float32))
        if not self.is_initializing():
            count.value = count.value + 1
        return x + count.value
""",
        "count[...] = count[...] + 1",
    ),
    Trap(
        """
class StateAugmented(nn.Module):
    @nn.compact
    def __call__(self, x):
        initialized = self.has_variable("batch_stats", "mean")
        mean = self.variable("batch_stats", "mean", lambda *s: jnp.zeros(s), x.shape[-1])
        if initialized:
            mean.value += 0.1 * x.mean((0, 1))
        return x - mean.value
""",
        "        mean[...] += 0.1",
    ),
    Trap(
        """
class StateMutable(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (4,))
        if train and self.is_mutable_collection("batch_stats"):
            mean.value = mean.value * 0.9
        return x - mean.value
""",
        "        if train:\n",
    ),
    Trap(
        """
class SowClash(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4, name="h")(x)
        self.sow("intermediates", "h_out", y)
        self.sow("intermediates", "y", y)
        return y
""",
        'self.sow(nnx.Intermediate, "h_out", y)',
    ),
    Trap(
        """
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
""",
        "self.head = nnx.Linear(4, self.classes, rngs=rngs)",
    ),
    Trap(
        """
class EqualByChance(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(6)(x)
        y = nn.Dense(y.shape[-1])(y.swapaxes(1, 2))
        return nn.Dense(4)(y)
""",
        "in_features: int, length: int",
    ),
    Trap(
        """
class ModePartial(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        dense = functools.partial(nn.Dense, use_bias=False)
        x = norm(name="first")(dense(5)(x))
        return norm(epsilon=1e-3)(dense(4)(x))
""",
        "use_running_average=not train",
    ),
    Trap(
        """
class WalrusTernary(nn.Module):
    norm: bool = True

    @nn.compact
    def __call__(self, x):
        n = nn.LayerNorm() if self.norm else (lambda y: y)
        if (y := nn.Dense(4)(x)) is not None:
            y = n(y)
        return y
""",
    ),
    Trap(
        """
class GetAttrLoop(nn.Module):
    def setup(self):
        for i in range(2):
            setattr(self, f"layer_{i}", nn.Dense(4))

    def __call__(self, x):
        for i in range(2):
            x = getattr(self, f"layer_{i}")(x)
        return x
""",
    ),
    Trap(
        """
class DictField(nn.Module):
    kind: str = "a"

    @nn.compact
    def __call__(self, x):
        cls = {"a": nn.Dense, "b": nn.DenseGeneral}[self.kind]
        return cls(4)(x)
""",
    ),
    Trap(
        """
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
""",
    ),
]
# Modules in modules.
CHILDREN = [
    Trap(
        """
class Part(nn.Module):
    n: int = 4
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.n)(x[:, :: self.strides])
        r = x
        if r.shape != y.shape:
            r = nn.Dense(self.n, name="proj")(x[:, :: self.strides])
        return r + y


class ShapeCondition(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n, s in ((4, 1), (8, 2), (8, 1), (4, 2)):
            x = Part(n, s)(x)
        return nn.Dense(4)(x)
""",
        "if in_features != self.n:",
    ),
    Trap(
        """
class Inner(nn.Module):
    n: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.n)(x)


class ModuleField(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.inner(x) + nn.Dense(4)(x)


class MakesModuleField(nn.Module):
    @nn.compact
    def __call__(self, x):
        return ModuleField(inner=Inner(4))(x)
""",
    ),
    Trap(
        """
class SharedField(nn.Module):
    def setup(self):
        self.a = Inner(4)
        self.one = ModuleField(self.a)
        self.two = ModuleField(self.a)

    def __call__(self, x):
        return self.two(self.one(x))
""",
        "self.two = ModuleField(self.a, in_features=4, rngs=rngs)",
    ),
    Trap(
        """
class Base(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return self.body(nn.Dense(self.width)(x))

    def body(self, x):
        return x


class Derived(Base):
    scale: float = 2.0

    @nn.compact
    def body(self, x):
        return nn.relu(x) * self.scale
""",
    ),
    Trap(
        """
class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(
            4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        )(x), None


class ScanMeta(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            Annotated,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layer()(x, None)[0]
""",
        '{nnx.PARTITION_NAME: "layers"}',
    ),
    Trap(
        """
class Outputs(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(4)(x)
        return x, x * 2


class ScanOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            Outputs,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, ys = layer(name="stack")(x, None)
        return x + ys.sum(0)
""",
    ),
    Trap(
        """
class RematBlock(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.n)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class RematStatic(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        block = nn.remat(RematBlock, static_argnums=(2,))
        for i in range(2):
            x = block(4, name=f"b_{i}")(x, train)
        return x
""",
        "static_argnums=(2,)",
    ),
    Trap(
        """
class VmapEnsemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        e = nn.vmap(
            Inner,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=3,
        )
        return e(4)(x).mean(0)
""",
    ),
    Trap(
        """
class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Inner)(4)(x)
""",
    ),
    Trap(
        """
class OtherMethod(nn.Module):
    def setup(self):
        self.enc = nn.Dense(3)
        self.dec = nn.Dense(4)

    def encode(self, x):
        return self.enc(x)

    def decode(self, z):
        return self.dec(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


class CallsMethodOfChild(nn.Module):
    def setup(self):
        self.ae = OtherMethod()

    def __call__(self, x):
        return self.ae.decode(nn.relu(self.ae.encode(x)))
""",
        "self.ae.decode(nnx.relu(self.ae.encode(x)))",
    ),
    Trap(
        """
class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        k = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(4, kernel_init=k)(x)
        x = nn.with_logical_constraint(x, ("batch", "len", "embed"))
        return x * self.param("s", nn.with_partitioning(nn.initializers.ones, ("embed",)), (4,))
""",
        "nn.with_logical_constraint(x",
    ),
]
# Layers that NNX lacks in this form, and attention and cells.
KEPT = [
    Trap(
        """
class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=not train), None


class ScanStatic(nn.Module):
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
""",
        "lambda layer, x: layer(x, train)",
    ),
    Trap(
        """
class ArrayField(nn.Module):
    scale: Any = dataclasses.field(default_factory=lambda: np.full((4,), 0.5, "float32"))

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x) * self.scale
""",
    ),
    Trap(
        """
class DenseGeneralBatch(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(4, axis=-1, batch_dims=(0,))(x)
""",
        "# Stays Linen: nnx.LinearGeneral has no argument batch_dims.",
    ),
    Trap(
        """
class EinsumCall(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((4, 4))(x, "bti,io->bto")
""",
        "# Stays Linen: nnx.Einsum needs the argument einsum_str.",
    ),
    Trap(
        """
class NormForced(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, force_float32_reductions=False)(x)
""",
        "self.batch_norm(x, use_running_average=not train)",
    ),
    Trap(
        """
class NormFeatureAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1))(x)
""",
        "# Stays Linen: its num_features could not be determined.",
    ),
    Trap(
        """
class AttentionOtherKeys(nn.Module):
    @nn.compact
    def __call__(self, x):
        other = nn.Dense(6)(x)
        return nn.MultiHeadDotProductAttention(2, qkv_features=4, out_features=4)(x, other)
""",
        "in_kv_features=6",
    ),
    Trap(
        """
class AttentionKeywords(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadAttention(2, use_bias=False, broadcast_dropout=False)(
            inputs_q=x, inputs_k=x, inputs_v=x
        )
""",
        "inputs_q=x, inputs_k=x, inputs_v=x",
    ),
    Trap(
        """
class AttentionSoftmax(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, force_fp32_for_softmax=True)(x)
""",
        "# Stays Linen: nnx.MultiHeadAttention has no argument force_fp32_for_softmax.",
    ),
    Trap(
        """
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
""",
        "cell.initialize_carry(x[:, 0].shape, nnx.Rngs(",
    ),
]
TRAPS = {
    "layers": LAYERS,
    "names": NAMES,
    "children": CHILDREN,
    "kept": KEPT,
}
NORM_OVER_DEVICES = """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, axis_name="devices")(x)
"""
