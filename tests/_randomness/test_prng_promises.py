"""The promises of JAX's PRNG design, kept by wrapped modules."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from tests._randomness.random_models import ONES, LinenTree, NnxTree, drawn, mask
from tests.models import assert_identical

KEYS = {
    "threefry2x32": lambda seed: jax.random.key(seed, impl="threefry2x32"),
    "rbg": lambda seed: jax.random.key(seed, impl="rbg"),
    "unsafe_rbg": lambda seed: jax.random.key(seed, impl="unsafe_rbg"),
    "legacy": jax.random.PRNGKey,
}


class LinenNoisy(nn.Module):
    """Only what is equal to the bit however it is compiled."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.uniform(1.0), x.shape)
        noise = jax.random.bits(self.make_rng("noise"), x.shape)
        return nn.Dropout(0.5, deterministic=False)(w), noise


class NnxNoisy(nnx.Module):
    def __init__(self, shape, *, rngs):
        self.w = nnx.Param(jax.random.uniform(rngs.params(), shape))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = rngs["noise"].fork()

    def __call__(self, x):
        return self.dropout(self.w[...]), jax.random.bits(self.noise(), x.shape)


def streams(kind, *names, seed=0):
    return {name: KEYS[kind](seed + i) for i, name in enumerate(names)}


@pytest.mark.parametrize("kind", KEYS)
def test_a_wrapped_linen_module_draws_with_every_kind_of_key(kind):
    module = LinenNoisy()
    keys = streams(kind, "params", "dropout", "noise")
    variables = module.init(keys, ONES)
    rngs = streams(kind, "dropout", "noise", seed=7)
    expected = module.apply(variables, ONES, rngs=rngs)

    def build(keys):
        return bridge.ToNNX(module, keys).lazy_init(ONES)

    for model in (build(keys), nnx.jit(build)(keys)):
        assert_identical(model.linen_variables(), variables)
        assert_identical(model(ONES, rngs=rngs), expected)
        assert_identical(nnx.jit(lambda m, r: m(ONES, rngs=r))(model, rngs), expected)
    eager, jitted = build(keys), build(keys)
    for _ in range(2):
        assert_identical(nnx.jit(lambda m: m(ONES))(jitted), eager(ONES))


@pytest.mark.parametrize("kind", KEYS)
def test_a_wrapped_nnx_module_draws_with_every_kind_of_key(kind):
    keys = streams(kind, "params", "dropout", "noise")
    native = NnxNoisy(ONES.shape, rngs=nnx.Rngs(**keys))
    model = bridge.to_linen(NnxNoisy, ONES.shape)
    variables = model.init(keys, ONES)
    assert_identical(variables["params"]["w"], native.w.get_value())
    assert_identical(jax.jit(model.init)(keys, ONES)["params"], variables["params"])
    threaded = lambda v: model.apply(v, ONES, mutable=["RngCount"])  # noqa: E731
    for _ in range(2):
        y, updates = threaded(variables)
        assert_identical(y, native(ONES))
        assert_identical(jax.jit(threaded)(variables)[0], y)
        variables = variables | updates
    rngs = streams(kind, "dropout", "noise", seed=7)
    y = model.apply(variables, ONES, rngs=rngs)
    assert_identical(jax.jit(lambda r: model.apply(variables, ONES, rngs=r))(rngs), y)
    assert mask(y[0]) != mask(
        model.apply(variables, ONES, rngs=streams(kind, "dropout", "noise"))[0]
    )


def sharded():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("data", "model"))


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def test_a_wrapped_linen_module_draws_the_same_sharded_and_not():
    sharding = sharded()

    def build():
        return bridge.ToNNX(LinenNoisy(), nnx.Rngs(params=0, dropout=1, noise=2))

    plain = build().lazy_init(ONES)
    y = plain(ONES)

    @jax.jit
    def make(x):
        model = build().lazy_init(x)
        w = jax.lax.with_sharding_constraint(model.w[...], sharding)
        model.w[...] = w
        return jax.lax.with_sharding_constraint(model(x), sharding), w

    out, w = make(jax.device_put(ONES, sharding))
    assert len(out[0].sharding.device_set) == len(w.sharding.device_set) == 8
    assert {shard.data.shape for shard in out[0].addressable_shards} == {(2, 4)}
    assert_identical(np.asarray(w), np.asarray(plain.w[...]))
    assert_identical(on_host(out), on_host(y))


def test_a_wrapped_nnx_module_draws_the_same_sharded_and_not():
    sharding = sharded()
    model = bridge.to_linen(NnxNoisy, ONES.shape)
    keys = streams("threefry2x32", "params", "dropout", "noise")
    variables = model.init(keys, ONES)

    @jax.jit
    def make(keys, x):
        y, variables = model.init_with_output(keys, x)
        w = jax.lax.with_sharding_constraint(variables["params"]["w"], sharding)
        return jax.lax.with_sharding_constraint(y, sharding), w

    x = jax.device_put(ONES, sharding)
    y, w = make(keys, x)
    assert len(y[0].sharding.device_set) == len(w.sharding.device_set) == 8
    assert_identical(np.asarray(w), np.asarray(variables["params"]["w"]))
    native = NnxNoisy(ONES.shape, rngs=nnx.Rngs(**keys))
    expected = native(ONES)
    assert_identical(on_host(y), on_host(expected))
    rngs = streams("threefry2x32", "dropout", "noise", seed=7)
    call = lambda x: model.apply(variables, x, rngs=rngs)  # noqa: E731
    out = jax.jit(call, out_shardings=(sharding, sharding))(x)
    assert_identical(on_host(out), on_host(call(ONES)))


BEFORE = (("draw", ("dropout",)), ("draw", ("dropout", "noise")))
AFTER = {
    "another draw": ("draw", ("dropout", "dropout")),
    "another stream": ("draw", ("dropout", "noise")),
    "a dropout": ("drop", "dropout"),
}


def named(first, second):
    return ("named", (("first", first), ("second", second)))


@pytest.mark.parametrize("changed", AFTER.values(), ids=AFTER)
def test_a_draw_more_in_one_linen_submodule_leaves_the_others_their_draws(changed):
    seeds = {"params": 0, "dropout": 1, "noise": 2}
    before, after = (
        bridge.ToNNX(LinenTree(named(first, BEFORE[1])), nnx.Rngs(**seeds))
        for first in (BEFORE[0], changed)
    )
    for _ in range(3):
        assert_identical(after()[1], before()[1])


@pytest.mark.parametrize("changed", [AFTER["another draw"], AFTER["another stream"]])
@pytest.mark.parametrize("style", ["rngs", "count"])
def test_a_draw_more_in_one_nnx_submodule_leaves_the_others_their_draws(changed, style):
    keys = streams("threefry2x32", "params", "dropout", "noise")
    outputs = []
    for first in (BEFORE[0], changed):
        spec = named(first, BEFORE[1])
        native = NnxTree(spec, rngs=nnx.Rngs(**keys))
        model = bridge.to_linen(NnxTree, spec)
        variables = model.init(keys)
        if style == "rngs":
            rngs = streams("threefry2x32", "dropout", "noise", seed=7)
            outputs.append(model.apply(variables, rngs=rngs)[1])
            continue
        y, updates = model.apply(variables, mutable=["RngCount"])
        z, _ = model.apply(variables | updates, mutable=["RngCount"])
        assert_identical((y, z), (native(), native()))
        outputs.append((y[1], z[1]))
    assert_identical(outputs[0], outputs[1])


def test_another_stream_in_the_rngs_leaves_the_others_their_draws():
    tree = LinenTree(BEFORE[0])
    few = bridge.ToNNX(tree, nnx.Rngs(params=0, dropout=1))
    many = bridge.ToNNX(tree, nnx.Rngs(noise=2, params=0, dropout=1, other=3))
    for _ in range(2):
        assert_identical(many(), few())
    model = bridge.to_linen(NnxTree, BEFORE[0])
    keys = streams("threefry2x32", "params", "dropout", "noise", "other")
    some = {name: keys[name] for name in ("params", "dropout")}
    few, many = (model.init(k) for k in (some, keys))
    assert_identical(*(model.apply(v, mutable=["RngCount"])[0] for v in (few, many)))
    assert_identical(*(model.apply(few, rngs={k: r[k] for k in r}) for r in (some, keys)))


def test_the_calls_of_one_wrapper_leave_the_draws_of_another_alone():
    class Two(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(params=0, dropout=1, noise=2)
            self.first = bridge.ToNNX(LinenTree(BEFORE[1]), rngs)
            self.second = bridge.ToNNX(LinenTree(BEFORE[1]), rngs)

    quiet, busy = Two(), Two()
    for _ in range(3):
        busy.first()
    assert_identical(busy.second(), quiet.second())
    assert not set(drawn(quiet.first())) & set(drawn(quiet.second()))


@pytest.mark.parametrize("rngs", [lambda: jax.random.key(0), lambda: nnx.Rngs(0, dropout=1)])
def test_a_wrapped_linen_module_passes_the_key_reuse_checker(rngs):
    with jax.debug_key_reuse(True):
        model = bridge.ToNNX(LinenNoisy(), rngs()).lazy_init(ONES)
        step = nnx.jit(lambda m, x: m(x))
        masks = {
            mask(y) for y, _ in (model(ONES), model(ONES), step(model, ONES), step(model, ONES))
        }
        assert len(masks) == 4
        grads = nnx.grad(lambda m: m(ONES)[0].sum())(model)
        assert grads["w"].shape == ONES.shape
        rngs = {"dropout": jax.random.key(5), "noise": jax.random.key(6)}
        jax.jit(lambda rngs: model(ONES, rngs=rngs))(rngs)


def test_a_wrapped_nnx_module_passes_the_key_reuse_checker():
    with jax.debug_key_reuse(True):
        model = bridge.to_linen(NnxNoisy, ONES.shape)
        keys = streams("threefry2x32", "params", "dropout", "noise")
        variables = model.init(keys, ONES)

        @jax.jit
        def step(variables):
            y, updates = model.apply(variables, ONES, mutable=["RngCount"])
            return y, variables | updates

        first, variables = step(variables)
        second, variables = step(variables)
        assert mask(first[0]) != mask(second[0])
        rngs = streams("threefry2x32", "dropout", "noise", seed=7)
        eager = model.apply(variables, ONES, rngs=rngs)
        seeded = jax.jit(lambda v, rngs: model.apply(v, ONES, rngs=rngs))
        assert_identical(seeded(variables, rngs), eager)


def test_the_key_reuse_checker_is_at_work():
    """What the two tests above would see."""
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        jax.random.normal(key, (2,))
        with pytest.raises(jax.errors.KeyReuseError):
            jax.random.normal(key, (2,))
