"""Small models, and how results are compared, for the tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import config, nnx
from flax import linen as nn


class LinenDot(nn.Module):
    """A kernel and nothing else, as in the guide."""

    features: int = 3

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))


class LinenMLP(nn.Module):
    """Nested compact modules with automatic names."""

    features: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(nn.relu(nn.Sequential([nn.Dense(4), nn.Dense(5)])(x)))


class LinenAutoencoder(nn.Module):
    """Submodules made in `setup`, and several methods."""

    features: int = 3
    name_of_owner: str = "nobody"

    def setup(self):
        self.encoder = nn.Dense(2)
        self.decoder = nn.Dense(self.features)
        self.activation = LinenActivation()

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.activation(self.encoder(x))

    def decode(self, z, *, scale=1.0):
        return self.decoder(z) * scale


class LinenActivation(nn.Module):
    """A submodule without variables."""

    def __call__(self, x):
        return nn.relu(x)

    def twice(self, x):
        return nn.relu(x) * 2


class LinenListsAndDicts(nn.Module):
    """Submodules in a list, a dict and a field."""

    head: nn.Module

    def setup(self):
        self.layers = [nn.Dense(4), nn.Dense(4)]
        self.branches = {"left": nn.Dense(2), "right": nn.Dense(2)}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.branches["left"](x) + self.branches["right"](x))


class LinenBlock(nn.Module):
    """One layer for `nn.scan` and `nn.vmap`, with parameters, statistics and dropout."""

    train: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        x = nn.Dense(x.shape[-1])(x)
        x = nn.BatchNorm(use_running_average=not self.train)(x)
        return nn.Dropout(0.5, deterministic=not self.train)(x), None


class LinenScanned(nn.Module):
    """`nn.scan` over layers."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LinenBlock,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return layers(self.train)(x, None)[0]


class LinenVmapped(nn.Module):
    """`nn.vmap` over the batch, with parameters of their own for each element."""

    train: bool = True

    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            LinenBlock,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
        )
        return mapped(self.train)(x[:, None])[0]


class LinenRecurrent(nn.Module):
    """`nn.RNN` over a cell."""

    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(4))(jnp.broadcast_to(x, (2, *x.shape)))


class LinenClassifier(nn.Module):
    """Convolutional style: Dense, BatchNorm and Dropout under one `train` argument."""

    features: int = 3

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.features)(x)


class LinenCounter(nn.Module):
    """Counts its calls in a collection of its own, and sows."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counter", "count", lambda: jnp.zeros((), jnp.int32))
        if self.is_mutable_collection("counter") and not self.is_initializing():
            count.value = count.value + 1
        self.sow("intermediates", "seen", jnp.sum(x))
        return nn.Dense(2)(x)


class LinenWriter(nn.Module):
    """Writes to its collections whether it may or not."""

    collections: tuple[str, ...] = ("counter",)

    @nn.compact
    def __call__(self, x, fail: bool = False):
        x = x * self.param("scale", nn.initializers.ones, ())
        for collection in self.collections:
            count = self.variable(collection, "count_" + collection, lambda: jnp.zeros(()))
            if not self.is_initializing():
                count.value = count.value + 1.0
        if self.has_rng("dropout"):
            x = nn.Dropout(0.5, deterministic=False)(x)
        if fail:
            raise ZeroDivisionError("asked to fail")
        return x


class LinenSameName(nn.Module):
    """One name in two collections, and one collection's leaf above another's subtree."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (1, x.shape[-1]))
        stat = self.variable("batch_stats", "w", jnp.zeros, (1, x.shape[-1]))
        deep = self.variable("cache", "w", lambda: {"mean": jnp.full((1, x.shape[-1]), 2.0)})
        if self.is_mutable_collection("batch_stats") and not self.is_initializing():
            stat.value = stat.value + x.sum(0, keepdims=True)
        return x * w + stat.value + deep.value["mean"]


class LinenAsks(nn.Module):
    """Returns what it is told about the mutability of collections and about `has_rng`."""

    names: tuple[str, ...] = ("params", "batch_stats", "cache", "intermediates")

    @nn.compact
    def __call__(self, x):
        self.variable("batch_stats", "mean", jnp.zeros, ())
        self.variable("cache", "index", jnp.zeros, ())
        self.param("w", nn.initializers.zeros, ())
        return tuple(self.is_mutable_collection(n) for n in self.names)


class LinenDropout(nn.Module):
    """Dropout between two Dense layers."""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        x = nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=deterministic)
        return nn.Dense(3)(x)


class LinenNoises(nn.Module):
    """Draws from the streams in `names`, and from `params` at initialisation."""

    names: tuple[str, ...] = ("noise",)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        for name in self.names:
            x = x + jax.random.normal(self.make_rng(name), x.shape)
        return x


class LinenSows(nn.Module):
    """Sows from two depths, once and twice."""

    @nn.compact
    def __call__(self, x):
        x = LinenInnerSows()(x)
        self.sow("intermediates", "sum", x.sum())
        self.sow("intermediates", "sum", 2 * x.sum())
        return x


class LinenInnerSows(nn.Module):
    """A Dense layer that sows its output."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2)(x)
        self.sow("intermediates", "out", x)
        return x


class LinenPerturbs(nn.Module):
    """Perturbs the output of its first layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2)(x)
        x = self.perturb("after_dense", x)
        return nn.Dense(1)(x).sum()


class LinenNamed(nn.Module):
    """A submodule, and a parameter beside it, of a given name."""

    child: str
    as_param: bool = False

    @nn.compact
    def __call__(self, x):
        if self.as_param:
            return x * self.param(self.child, nn.initializers.ones, (1, x.shape[-1]))
        return nn.Dense(3, name=self.child)(x)


class LinenApplies(nn.Module):
    """Calls a function, which may hold any state the test wants."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, *args):
        return self.function(self, *args)


class NnxNormed(nnx.Module):
    """A layer and its batch norm."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class NnxNoisyNorm(nnx.Module):
    """Dropout and batch norm, whose modes are attributes."""

    def __init__(self, *, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


class NnxDropped(nnx.Module):
    """Dropout after a layer."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class NnxStack(nnx.Module):
    """Layers in a list, so that their keys are integers."""

    def __init__(self, depth, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class LinenKeyAt(nn.Module):
    """Returns the key that its descendant of these names is given, before any draw."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self):
        if self.names:
            return LinenKeyAt(self.names[1:], name=self.names[0])()
        return self.scope.rngs["stream"].as_jax_rng()


def linen_key_at(key, *path):
    """The key that Linen makes of a key for a submodule at a path."""
    # Without the flag Linen hashes the names of a path as if they were one.
    with config.temp_flip_flag("fix_rng_separator", True):
        return LinenKeyAt(path, parent=None).apply({}, rngs={"stream": key})


def leaf_paths(model):
    """The paths of a model's state, without the wrappers' own RNG state."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {path: leaf.var_type for path, leaf in flat if "to_nnx__rngs" not in path}


def rng_counts(model):
    """The counter of every RNG stream by path, as ints or lists."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.RngCount))
    return {path: np.asarray(leaf.get_value()).tolist() for path, leaf in flat}


def snapshot(model):
    """Everything that a call may change: identity, type, value and metadata of each Variable."""
    flat = {}
    for path, item in nnx.iter_graph(model, graph=True):
        if isinstance(item, nnx.Variable):
            value = item.get_raw_value()
            value = value[...] if item.ref else value
            host = [_on_host(x) for x in jax.tree.leaves(value)]
            flat[path] = (
                id(item),
                item.var_type,
                jax.tree.structure(value),
                host,
                item.get_metadata(),
            )
        elif isinstance(item, nnx.Pytree):
            own = vars(item)
            static = {k: v for k, v in own.items() if isinstance(v, (int, str, tuple, bool))}
            flat[path] = (id(item), type(item), sorted(own), static)
    return flat


def assert_identical(actual, expected):
    """Asserts that two trees have the same structure, shapes, dtypes and values, path by path.

    Leaves are arrays, possibly abstract or of typed keys, Python numbers or strings.
    """
    for path, a, b in _pairs(actual, expected):
        if isinstance(b, str | jax.ShapeDtypeStruct):
            assert a == b, f"at {path}"
            continue
        assert _kind(a) == _kind(b), f"at {path}"
        np.testing.assert_array_equal(_as_numpy(a), _as_numpy(b), err_msg=f"at {path}")


def assert_close(actual, expected):
    """Asserts that two trees have the same structure and dtypes, and values up to rounding.

    For two programs that are compiled differently: XLA may sum in another order, and may fuse a
    product and a sum into one instruction. The tolerance follows from the dtype and from the
    largest value of an array: a small sum of large terms has the rounding errors of the terms.
    """
    for path, a, b in _pairs(actual, expected):
        assert _kind(a) == _kind(b), f"at {path}"
        found, wanted = _as_numpy(a), _as_numpy(b)
        tolerance = 0.0
        if jnp.issubdtype(wanted.dtype, jnp.inexact):
            tolerance = 32 * float(jnp.finfo(wanted.dtype).eps)
        largest = float(np.max(np.abs(wanted), initial=0))
        np.testing.assert_allclose(
            found, wanted, rtol=tolerance, atol=tolerance * largest, err_msg=f"at {path}"
        )


def assert_same_program(actual, expected, *args, compare=assert_identical):
    """Asserts that two functions are one program, or that the results of their programs are equal.

    What they close over is part of a program. Programs with one text are not compiled.
    """
    # One name for both, which is part of the text.
    programs = [jax.jit(lambda *args, f=f: f(*args)).lower(*args) for f in (actual, expected)]
    found, wanted = (program.out_info for program in programs)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    if programs[0].as_text() != programs[1].as_text():
        compare(*(program.compile()(*args) for program in programs))


def _pairs(actual, expected):
    """(path, leaf, leaf) of two trees of one structure."""
    found, wanted = map(jax.tree_util.tree_leaves_with_path, (actual, expected))
    paths, wanted_paths = ([_path_text(path) for path, _ in side] for side in (found, wanted))
    assert paths == wanted_paths
    # Containers of other types, and nodes without leaves.
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    return [(path, a, b) for path, (_, a), (_, b) in zip(paths, found, wanted, strict=True)]


def _path_text(path):
    return jax.tree_util.keystr(path) or "the root"


def _kind(leaf):
    array = jnp.asarray(leaf)
    return array.shape, array.dtype


def equations(jaxpr):
    """How many equations a jaxpr has, those of its inner jaxprs included."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                total += equations(getattr(value, "jaxpr", value))
    return total


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _as_numpy(value):
    value = jnp.asarray(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def _on_host(value):
    array = _as_numpy(value)
    return array.dtype, array.shape, array.tobytes()
