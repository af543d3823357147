"""Annotated models, each in Linen and in NNX, and their mixtures; with the specs they ought to get.

Dimensions are such that a full parameter has a shape that nothing else in a program has.
"""

import contextlib
import functools
import warnings

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bridge

LAYERS, WIDTH, HIDDEN, CLASSES = 3, 24, 40, 16
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)

# What each logical name is split over.
AXES = {"embed": "data", "mlp": "model", "both": ("data", "model"), "layers": None}
RULES = tuple(AXES.items())

AXIS_TYPES = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@functools.cache
def mesh(kind="auto"):
    """The mesh of 2 x 4 devices."""
    return jax.make_mesh((2, 4), ("data", "model"), AXIS_TYPES[kind], devices=jax.devices()[:8])


@contextlib.contextmanager
def with_mesh(mesh):
    """`with mesh:`, which JAX has deprecated in some releases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def gathered(x):
    """An activation on every device, where JAX leaves that to the program."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.sharding.reshard(x, P()) if explicit else x


def axes(*names):
    """Logical names as mesh axes."""
    return tuple(AXES.get(name) for name in names)


def linen_init(style, init, *names):
    if style == "logical":
        return nn.with_logical_partitioning(init, names)
    if style == "own rules":
        return nn.with_logical_partitioning(init, names, rules=RULES)
    return nn.with_partitioning(init, axes(*names))


def nnx_init(style, init, *names):
    if style == "own rules":
        return nnx.with_partitioning(init, names, sharding_rules=RULES)
    return nnx.with_partitioning(init, names if style == "logical" else axes(*names))


# Quicker to compile than what both libraries have by default.
uniform = nn.initializers.uniform(0.1)
ones = nn.initializers.ones_init()


class LinenBlock(nn.Module):
    """A layer of the stack: a norm, two matrices, dropout, statistics that are not annotated."""

    style: str = "mesh"
    train: bool = False

    @nn.compact
    def __call__(self, x, _):
        of = functools.partial(linen_init, self.style)
        h = nn.LayerNorm(scale_init=of(ones, "embed"), use_bias=False, name="norm")(x)
        up = of(uniform, "embed", "mlp")
        h = nn.Dense(HIDDEN, use_bias=False, kernel_init=up, name="up")(gathered(h))
        statistics = nn.BatchNorm(use_running_average=not self.train, name="statistics")
        h = nn.Dropout(0.5, deterministic=not self.train)(nn.gelu(statistics(gathered(h))))
        down = of(uniform, "mlp", "embed")
        h = nn.Dense(WIDTH, use_bias=False, kernel_init=down, name="down")(h)
        return x + gathered(h), None


class LinenStack(nn.Module):
    """Scanned layers and a head."""

    style: str = "mesh"
    train: bool = False

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LinenBlock,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
            metadata_params=layer_name(self.style, nn),
        )
        x, _ = layers(self.style, self.train, name="layers")(x, None)
        head = linen_init(self.style, uniform, "both", None)
        return gathered(nn.Dense(CLASSES, kernel_init=head, name="head")(x))


class NNXBlock(nnx.Module):
    """`LinenBlock` in NNX."""

    def __init__(self, style, *, rngs):
        of = functools.partial(nnx_init, style)
        scale = of(ones, "embed")
        self.norm = nnx.LayerNorm(WIDTH, scale_init=scale, use_bias=False, rngs=rngs)
        up, down = of(uniform, "embed", "mlp"), of(uniform, "mlp", "embed")
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=up, rngs=rngs)
        self.statistics = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        h = self.statistics(gathered(self.up(gathered(self.norm(x)))))
        return x + gathered(self.down(self.dropout(nnx.gelu(h))))


class NNXStack(nnx.Module):
    """`LinenStack` in NNX."""

    def __init__(self, style="mesh", *, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata=layer_name(style, nnx))
        def layers(rngs):
            return NNXBlock(style, rngs=rngs)

        self.style = style
        self.layers = layers(rngs)
        head = nnx_init(style, uniform, "both", None)
        self.head = nnx.Linear(WIDTH, CLASSES, kernel_init=head, rngs=rngs)
        self.eval()

    def __call__(self, x):
        run = nnx.scan(
            lambda x, layer: layer(x),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata=layer_name(self.style, nnx),
        )
        return gathered(self.head(run(x, self.layers)))


class MixedNNX(nnx.Module):
    """An NNX model that holds the stack in Linen and a native matrix."""

    def __init__(self, style="mesh", *, rngs):
        self.stack = bridge.ToNNX(LinenStack(style), rngs)
        last = nnx_init(style, uniform, "embed", "mlp")
        self.last = nnx.Linear(CLASSES, 8, kernel_init=last, rngs=rngs)

    def __call__(self, x):
        return gathered(self.last(self.stack(x)))


class MixedLinen(nn.Module):
    """A Linen model that holds the stack in NNX and a native matrix."""

    style: str = "mesh"

    @nn.compact
    def __call__(self, x):
        x = bridge.to_linen(NNXStack, self.style, name="stack")(x)
        last = linen_init(self.style, uniform, "embed", "mlp")
        return gathered(nn.Dense(8, kernel_init=last, name="last")(x))


def layer_name(style, library):
    """What the axis of the layers is called: no axis of the mesh has this name."""
    return {library.PARTITION_NAME: None if style == "mesh" else "layers"}


STACK = {
    "layers/norm/scale": P(None, "data"),
    "layers/up/kernel": P(None, "data", "model"),
    "layers/down/kernel": P(None, "model", "data"),
    "head/kernel": P(("data", "model"), None),
}
MIXED = {f"stack/{path}": spec for path, spec in STACK.items()} | {
    "last/kernel": P("data", "model")
}

# How each is made, with its keys, and the specs of its annotated parameters; what is not there is
# not sharded.
BUILDS = {
    "ToNNX": (lambda style: lambda: bridge.ToNNX(LinenStack(style), KEY), None, STACK),
    "NNX holding ToNNX": (lambda style: functools.partial(MixedNNX, style), KEY, MIXED),
    "Linen holding ToLinen": (MixedLinen, KEY, MIXED),
    "ToLinen": (lambda style: bridge.to_linen(NNXStack, style), KEY, STACK),
    "ToLinen of NNX holding ToNNX": (lambda style: bridge.to_linen(MixedNNX, style), KEY, MIXED),
}


def leaves_by_path(tree):
    """The arrays of a model or of Linen variables, by path without the collection."""
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return {p.removeprefix("params/").removesuffix("/value"): leaf for p, leaf in named.items()}


def expected_sharding(specs, path, mesh):
    return NamedSharding(mesh, specs.get(path, P()))


def shard_shape(shape, spec):
    """The shape of one device's part, counted by hand."""
    divisors = {None: 1, "data": 2, "model": 4, ("data", "model"): 8}
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(n // divisors[entry] for n, entry in zip(shape, entries, strict=True))


def variables_of(model):
    """Parameters and statistics of a model as plain Linen variables."""
    if isinstance(model, nnx.Module):
        types = {"params": nnx.Param, "batch_stats": nnx.BatchStat}
        found = {name: nnx.to_pure_dict(nnx.state(model, kind)) for name, kind in types.items()}
    else:
        found = nn.unbox({name: model[name] for name in ("params", "batch_stats")})
    return found


# Compiled once for all models.
_stack_on_one_device = jax.jit(LinenStack().apply)


def computed_by_hand(model, x):
    """What any of the models computes, by pure Linen on one device."""
    variables = jax.tree.map(np.asarray, variables_of(model))
    stack = {name: tree.get("stack", tree) for name, tree in variables.items()}
    out = _stack_on_one_device(stack, x)
    last = variables["params"].get("last")
    return out if last is None else out @ last["kernel"] + last["bias"][None]
