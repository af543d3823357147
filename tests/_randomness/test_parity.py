"""Same key, same numbers: a wrapped module initialises and draws as the native one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests._randomness.random_models import by_path, native_by_path
from tests.models import assert_identical

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
LAYERS = 3
KEYS = {
    "one key": jax.random.key(5),
    "several": {n: jax.random.key(i) for i, n in enumerate(("params", "dropout", "noise", "code"))},
}


class Layer(nn.Module):
    """Draws initial values and masks from four streams."""

    @nn.compact
    def __call__(self, x, _=None):
        code = self.variable(
            "buffers", "code", lambda: jax.random.normal(self.make_rng("code"), (4,))
        )
        x = nn.Dense(4)(x) + jnp.broadcast_to(code.value, x.shape)
        x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dropout(0.5, deterministic=False)(x), None


class Nested(nn.Module):
    """Modules in modules, in a list, in a loop, and one that is called twice."""

    def setup(self):
        self.blocks = [Pair(), Pair()]
        self.shared = Layer()

    def __call__(self, x):
        for block in self.blocks:
            x = self.shared(block(x))[0]
        return x


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Layer()(x)[0]
        return x


AXES = {"params": 0, "buffers": 0}


def lifted(transform, split, **options):
    """A module that applies a lifted Layer."""

    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            names = ("params", "dropout", "noise", "code")
            layers = transform(
                Layer, variable_axes=AXES, split_rngs={n: n in split for n in names}, **options
            )
            return layers()(x, None)[0]

    return Lifted()


class ScannedVmapped(nn.Module):
    """`nn.scan` over `nn.vmap`."""

    @nn.compact
    def __call__(self, x):
        split = {"params": True, "dropout": True, "noise": False, "code": True}
        inner = nn.vmap(Layer, variable_axes=AXES, split_rngs=split, in_axes=(0, None))
        outer = nn.scan(inner, variable_axes=AXES, split_rngs=split, length=LAYERS)
        return outer()(x, None)[0]


ALL = ("params", "dropout", "noise", "code")
LINEN = {
    "nested": Nested,
    "scan, all split": lambda: lifted(nn.scan, ALL, length=LAYERS),
    "scan, some split": lambda: lifted(nn.scan, ("params", "noise"), length=LAYERS),
    "vmap, all split": lambda: lifted(nn.vmap, ALL, in_axes=(0, None)),
    "vmap, none split": lambda: lifted(nn.vmap, (), in_axes=(0, None)),
    "scan over vmap": ScannedVmapped,
}


# What one key stands for does not depend on the module.
BY_KEYS = [(name, "several") for name in LINEN]
BY_KEYS += [("nested", "one key"), ("scan over vmap", "one key")]


@pytest.mark.parametrize(("name", "which"), BY_KEYS)
def test_a_wrapped_linen_module_initialises_and_draws_as_init_and_apply(name, which):
    module, keys = LINEN[name](), KEYS[which]
    variables = module.init(keys, X)
    model = bridge.ToNNX(module, keys).lazy_init(X)
    assert_identical(model.linen_variables(), variables)
    for seed in (1, 2):
        rngs = {n: jax.random.key(seed + i) for i, n in enumerate(ALL[1:])}
        assert_identical(model(X, rngs=rngs), module.apply(variables, X, rngs=rngs))
    key = jax.random.key(3)
    assert_identical(model(X, rngs=key), module.apply(variables, X, rngs={"params": key}))


@pytest.mark.parametrize(
    "name", ["nested", "scan, some split", "vmap, none split", "scan over vmap"]
)
def test_calls_of_a_wrapped_linen_module_are_apply_with_stream_keys(name):
    module = LINEN[name]()
    seeds = {n: i for i, n in enumerate(ALL)}
    model = bridge.ToNNX(module, nnx.Rngs(**seeds))
    streams = nnx.Rngs(**seeds).fork()
    variables = module.init({n: streams[n]() for n in ALL}, X)
    model.lazy_init(X)
    assert_identical(model.linen_variables(), variables)
    # What lazy_init leaves behind is not what is tested here.
    streams_of_a_call = {n: nnx.clone(model.to_nnx__rngs[n]) for n in ("dropout", "noise")}
    for _ in range(3):
        rngs = {n: stream() for n, stream in streams_of_a_call.items()}
        assert_identical(model(X), module.apply(variables, X, rngs=rngs))


class NnxLayer(nnx.Module):
    """Draws initial values and masks from several streams."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.code = nnx.BatchStat(jax.random.normal(rngs.code(), (4,)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = rngs["noise"].fork()

    def __call__(self, x):
        x = self.linear(x) + jnp.broadcast_to(self.code[...], x.shape)
        return self.dropout(x + jax.random.normal(self.noise(), x.shape))


class NnxNested(nnx.Module):
    """Modules in a list and a dict, and one that is called twice."""

    def __init__(self, *, rngs):
        self.blocks = nnx.List([NnxLayer(rngs), NnxLayer(rngs)])
        self.named = nnx.Dict(left=NnxLayer(rngs), right=NnxLayer(rngs))
        self.shared = NnxLayer(rngs)

    def __call__(self, x):
        for block in (*self.blocks, self.named["left"], self.named["right"]):
            x = self.shared(block(x))
        return x


class NnxLayers(nnx.Module):
    """Layers made by `nnx.vmap`, whose streams were split."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs):
            return NnxLayer(rngs)

        self.layers = make(rngs)


class NnxScanned(NnxLayers):
    def __call__(self, x):
        step = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, length=LAYERS
        )
        return step(x, self.layers)


class NnxVmapped(NnxLayers):
    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


NNX = {"nested": NnxNested, "scan": NnxScanned, "vmap": NnxVmapped}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", NNX)
def test_a_wrapped_nnx_module_initialises_and_draws_as_the_native_one(name, keys):
    if isinstance(keys, dict):
        rngs = nnx.Rngs(**{n.replace("params", "default"): key for n, key in keys.items()})
    else:
        rngs = nnx.Rngs(keys)
    native = NNX[name](rngs=rngs)
    model = bridge.to_linen(NNX[name])
    variables = model.init(keys, X)
    assert_identical(by_path(variables | {"nnx": {}}), native_by_path(native))
    for _ in range(3):
        y, updates = model.apply(variables, X, mutable=["RngCount"])
        assert_identical(y, native(X))
        variables = variables | updates
    assert_identical(by_path(variables | {"nnx": {}}), native_by_path(native))


class Initialised(nn.Module):
    """A parameter, a variable and noise, all at one place, from the streams that are there."""

    @nn.compact
    def __call__(self, _=None):
        draw = lambda: jax.random.normal(self.make_rng("noise"), (4,))  # noqa: E731
        param = self.param("w", nn.initializers.normal(1.0), (4,))
        return param, self.variable("buffers", "b", draw).value, draw()


INITIALISING = {
    "inputs": lambda model: model.lazy_init(X),
    "shapes": lambda model: model.lazy_init(jax.ShapeDtypeStruct(X.shape, X.dtype)),
    "inside another": lambda model: bridge.lazy_init(nnx.Sequential(model), X).layers[0],
    "jit": nnx.jit(lambda model: model.lazy_init(X)),
}


@pytest.mark.parametrize("how", INITIALISING)
@pytest.mark.parametrize("seeds", [{"default": 0}, {"params": 0, "noise": 1}], ids=str)
def test_a_key_of_initial_values_is_not_drawn_again_in_the_first_call(how, seeds):
    """Regression: lazy_init put the counts back, so noise and parameters had one key."""
    model = INITIALISING[how](bridge.ToNNX(Initialised(), nnx.Rngs(**seeds)))
    param, buffer, noise = model()
    again = model()[2]
    assert len({tuple(x.tolist()) for x in (param, buffer, noise, again)}) == 4


def test_a_linen_dropout_has_one_mask_with_one_key_wherever_it_is_wrapped():
    """At the same place, below the module that is given the key."""

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = bridge.ToNNX(nn.Dropout(0.5, deterministic=False))

        def __call__(self, x, key):
            return self.inner(x, rngs={"dropout": key})

    x, key = jnp.ones((4, 16)), jax.random.key(2)
    expected = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})
    assert_identical(Outer()(x, key), expected)
    wrapped = bridge.to_linen(Outer, skip_rng=True)
    assert_identical(wrapped.apply(wrapped.init({}, x, key), x, key), expected)
