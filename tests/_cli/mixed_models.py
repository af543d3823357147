"""Models for the command line to report on: mixtures whose sizes are easy to count by hand."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

WIDTH = 4
DENSE = WIDTH * WIDTH + WIDTH
X = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)


class LinenBlock(nn.Module):
    """A Dense layer and a native NNX one."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        return bridge.to_linen(NnxInner, name="inner")(x)


class NnxInner(nnx.Module):
    """A Linear layer, and a Linen Dense layer in a wrapper: the third level."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.old = bridge.ToNNX(nn.Dense(WIDTH), rngs=rngs)

    def __call__(self, x):
        return self.old(self.linear(x))


class Mixed(nnx.Module):
    """NNX on top, Linen below it, NNX below that, and Linen below that."""

    def __init__(self, *, rngs):
        self.stem = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([bridge.ToNNX(LinenBlock(), rngs=rngs) for _ in range(2)])
        self.norm = bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=rngs)
        self.again = self.stem
        self.scale = nnx.Param(jnp.ones((1, WIDTH), jnp.bfloat16))

    def __call__(self, x):
        x = self.again(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale


class Scanned(nn.Module):
    """Three NNX layers stacked by `nn.scan`, which leaves their GraphDef behind, and `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            ScannedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.remat(nn.Dense)(WIDTH)(layers(name="layers")(x, None)[0])


class ScannedLayer(nn.Module):
    """One layer of the stack."""

    @nn.compact
    def __call__(self, x, _):
        return bridge.to_linen(nnx.Linear, WIDTH, WIDTH, name="linear")(x), None


class Unusual(nn.Module):
    """A layer without an NNX class, a mapping as a parameter, and a collection of state."""

    @nn.compact
    def __call__(self, x):
        tree = self.param("tree", lambda key: {"a": jnp.ones((3,)), "b": jnp.ones((5,))})
        self.variable("counter", "count", jnp.zeros, (7,))
        x = nn.ConvLocal(2, (1,))(x[..., None])
        return x * tree["a"].sum() * tree["b"].sum()


def make_mixed():
    """The mixed model, initialised here."""
    return bridge.lazy_init(Mixed(rngs=nnx.Rngs(0)), jnp.ones((2, WIDTH)))


def make_with_inputs():
    """The mixed model with sample inputs."""
    return Mixed(rngs=nnx.Rngs(0)), X


def make_scanned():
    """A Linen model with sample inputs, as a dict."""
    return {"model": Scanned(), "inputs": (X,)}


def make_unusual():
    """Layers of several sorts."""
    return Unusual(), X


def make_uninitialised():
    """A ToNNX that nobody has shown an input."""
    return bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))


def make_one_of_values():
    """Asks for an array's value while it is made."""
    width = int(jnp.ones(()) * WIDTH)
    return nnx.Linear(width, width, rngs=nnx.Rngs(0))


def make_nothing():
    """Gives no model."""
    return 3


def make_error():
    """Fails."""
    raise ZeroDivisionError("asked to fail")


def make_unknown_key():
    """A dict with a key that is not one of those that are known, and inputs in no tuple."""
    return {"model": Scanned(), "inputz": (X,), "inputs": jnp.ones((2, WIDTH))}


def make_huge():
    """Two terabyte-sized layers, one of them Linen."""
    side = 10**6
    model = nnx.Sequential(
        nnx.Linear(side, side, use_bias=False, rngs=nnx.Rngs(0)),
        bridge.ToNNX(nn.Dense(side, use_bias=False), rngs=nnx.Rngs(0)),
    )
    return model, jax.ShapeDtypeStruct((1, side), jnp.float32)


class Jitted(nnx.Module):
    """Two equal blocks, which `nnx.jit` traces once."""

    def __init__(self, *, rngs):
        self.blocks = nnx.List(
            [bridge.ToNNX(LinenOuter(), rngs=nnx.Rngs(rngs())) for _ in range(2)]
        )

    def __call__(self, x):
        for block in self.blocks:
            x = _call(block, x)
        return x


class LinenOuter(nn.Module):
    """A Dense layer in a module."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


@nnx.jit
def _call(block, x):
    return block(x)


def make_jitted():
    """Two equal blocks."""
    return Jitted(rngs=nnx.Rngs(0)), X


def make_restored():
    """A wrapper that was given variables, and never ran."""
    variables = jax.eval_shape(LinenBlock().init, jax.random.key(0), X)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    return bridge.ToNNX.from_variables(LinenBlock(), zeros)


def make_half_restored():
    """Two wrappers of equal modules, only one of which ran."""
    restored = make_restored()
    running = bridge.ToNNX(LinenBlock(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, WIDTH)))
    return nnx.Sequential(restored, running)


class Offset(nn.Module):
    """An array among its fields."""

    offset: jax.Array

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x) + self.offset


def make_with_arrays():
    """Modules that cannot be compared."""
    offsets = jnp.zeros((1, WIDTH)), jnp.ones((1, WIDTH))
    wrappers = [bridge.ToNNX(Offset(offset), rngs=nnx.Rngs(0)) for offset in offsets]
    return nnx.Sequential(*wrappers), X


def make_transformed():
    """A lifted transform's class itself."""
    return nn.remat(nn.Dense)(WIDTH), X


class TwoMethods(nn.Module):
    """Has a method besides `__call__`."""

    def setup(self):
        self.encoder = nn.Dense(WIDTH)
        self.decoder = nn.Dense(WIDTH)

    def __call__(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x, *, scale=1.0):
        return self.encoder(x) * scale


def make_by_method():
    """Only the encoder runs."""
    return {"model": TwoMethods(), "inputs": [X], "kwargs": {"scale": 2.0}, "method": "encode"}


class PeerMixed(nnx.Module):
    """The wrappers of `flax.nnx.bridge` in the places of ours."""

    def __init__(self, *, rngs):
        self.old = nnx.bridge.ToNNX(PeerBlock(), rngs=rngs)
        self.new = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.new(self.old(x))


class PeerBlock(nn.Module):
    """A Dense layer, and an NNX one in a wrapper."""

    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(nnx.Linear, WIDTH, WIDTH, name="inner")(nn.Dense(WIDTH)(x))


def make_with_peer():
    """A model that was initialised by `flax.nnx.bridge`."""
    return nnx.bridge.lazy_init(PeerMixed(rngs=nnx.Rngs(0)), jnp.ones((2, WIDTH)))


def make_wrapped_wrapper():
    """An NNX module that is wrapped twice, and no variables yet."""
    return bridge.ToNNX(bridge.to_linen(nnx.Linear, WIDTH, WIDTH), rngs=nnx.Rngs(0))


MODEL = nn.Dense(WIDTH)
NNX_MODEL = bridge.ToNNX(nn.Dense(WIDTH), rngs=nnx.Rngs(0))


def make_linen_pair():
    """The Linen model of a pair with the same layers."""
    layers = [nn.Dense(3), nn.BatchNorm(use_running_average=True)]
    return nn.Sequential(layers), jnp.ones((1, WIDTH))


def make_nnx_pair():
    """The NNX model of the pair, which has RNG state besides."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(WIDTH, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    )


def make_lstm():
    return nn.RNN(nn.OptimizedLSTMCell(3)), jnp.ones((1, 2, 4))


def make_normed_local():
    layer = nn.ConvLocal(3, (2,), name="layer_instance")
    return {"model": nn.WeightNorm(layer), "inputs": (jnp.ones((1, 4, 2)),)}


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(200):
            x = nn.Sequential([nn.LayerNorm(), nn.Dense(4), nn.Dense(4)])(x)
        return x


def make_linen_tower():
    return Tower(), jnp.ones((1, 4))


def make_nnx_tower():
    rngs = nnx.Rngs(0)
    layers = [
        nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)) for _ in range(200)
    ]
    return nnx.Sequential(*layers)
