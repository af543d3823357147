"""ToNNX: where keys come from, when they are drawn, and parity with Linen."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import bridge
from tests import models
from tests.models import (
    assert_close,
    assert_identical,
    assert_same_program,
    equations,
    rng_counts,
    snapshot,
)

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)

DETERMINISTIC = {
    "dense": lambda: (nn.Dense(3), X),
    "nested": lambda: (models.LinenMLP(), X),
    "setup": lambda: (models.LinenAutoencoder(), X),
    "dropout off": lambda: (models.LinenDropout(deterministic=True), X),
    "classifier": lambda: (models.LinenClassifier(), X, False),
    "scan": lambda: (models.LinenScanned(train=False), X),
    "vmap": lambda: (models.LinenVmapped(train=False), X),
    "remat": lambda: (nn.remat(models.LinenMLP)(), X),
    "rnn": lambda: (models.LinenRecurrent(), X),
    "attention": lambda: (nn.MultiHeadDotProductAttention(2, deterministic=True), X[None]),
    "jit": lambda: (nn.jit(models.LinenDropout)(deterministic=True), X),
    "fold_rngs": lambda: (nn.fold_rngs(models.LinenDropout)(deterministic=True), X),
    "jit of fold_rngs": lambda: (nn.jit(nn.fold_rngs(models.LinenDropout))(True), X),
    "jit inside": lambda: (LinenLayers("none"), X, True),
    "jit in remat": lambda: (LinenLayers("remat"), X, True),
    "jit in vmap": lambda: (LinenLayers("vmap"), X, True),
    "jit in scan": lambda: (LinenLayers("scan"), X, True),
    "jit in cond": lambda: (LinenLayers("cond"), X, True),
}


class LinenLayers(nn.Module):
    """Two layers under `nn.jit`, whose argument says what the second one does; in a transform."""

    around: str

    @nn.compact
    def __call__(self, x, deterministic):
        def body(module, x):
            x = nn.Dense(4, name="dense")(x)
            x = NoisyJit(name="first")(x, True)
            return NoisyJit(name="second")(x, deterministic)

        split = {"params": True, "dropout": True, "default": True}
        axes = {"variable_axes": {"params": 0}, "split_rngs": split}
        if self.around == "remat":
            return nn.remat(body)(self, x)
        if self.around == "vmap":
            return nn.vmap(body, **axes)(self, x)
        if self.around == "scan":
            step = lambda module, x, _: (body(module, x), None)  # noqa: E731
            return nn.scan(step, **axes, length=2)(self, x, None)[0]
        if self.around == "cond" and not self.is_initializing():
            return nn.cond(x.sum() > 100, lambda m, x: x, body, self, x)
        return body(self, x)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dropout(0.5)(x, deterministic=deterministic)


NoisyJit = nn.jit(Noisy, static_argnums=2)

# Linen hands keys to the transformed function before that function asks for one.
LIFTED = ("scan", "vmap", "remat", "rnn", *(n for n in DETERMINISTIC if "jit" in n or "fold" in n))


@functools.cache
def deterministic(name):
    """A model and its arguments, made once."""
    module, *args = DETERMINISTIC[name]()
    # Shapes are enough, for which nothing is computed but the initial values.
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) if x is args[0] else x for x in args]
    model = bridge.ToNNX(module, nnx.Rngs(0, params=1, dropout=2)).lazy_init(*like)
    return model, module, args


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_call_leaves_every_counter_alone(name):
    model, _, args = deterministic(name)
    before = snapshot(model)
    if "jit" in name or "dropout" in name:
        model(*args)
    assert snapshot(model) == before
    graphdef, state = nnx.split(model)

    def after(state, x):
        traced = nnx.merge(graphdef, state, copy=True)
        traced(x, *args[1:])
        return nnx.state(traced)

    jaxpr = jax.make_jaxpr(after)(state, args[0]).jaxpr
    assert jaxpr.outvars == jaxpr.invars[:-1]


@pytest.mark.parametrize("name", [n for n in DETERMINISTIC if n not in LIFTED])
def test_a_deterministic_call_has_as_many_equations_as_linen_apply(name):
    model, module, args = deterministic(name)
    graphdef, state = nnx.split(model)
    variables = model.linen_variables()

    def ours(state, x):
        return nnx.merge(graphdef, state)(x, *args[1:])

    def linen(variables, x):
        return module.apply(variables, x, *args[1:])

    ours_jaxpr = jax.make_jaxpr(ours)(state, args[0])
    linen_jaxpr = jax.make_jaxpr(linen)(variables, args[0])
    assert equations(ours_jaxpr.jaxpr) == equations(linen_jaxpr.jaxpr)


CLOSING = {
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, -x])),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: (
        lambda x: jax.lax.scan(lambda _, y: (None, f(y)), None, jnp.stack([x, -x]))[1]
    ),
    "grad": lambda f: jax.grad(lambda y: f(y).sum()),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_call_can_be_closed_over(name):
    """Defect 5: every call advanced every stream."""
    model, module, args = deterministic(name)
    variables = model.linen_variables()
    ours = lambda x: model(x, *args[1:])  # noqa: E731
    linen = lambda x: module.apply(variables, x, *args[1:])  # noqa: E731
    closed = [
        lambda x, f=f: {name: closing(f)(x) for name, closing in CLOSING.items()}
        for f in (ours, linen)
    ]
    assert_same_program(*closed, args[0])
    if name in ("dropout off", "jit in vmap"):
        # Where the transform is the outermost one.
        for closing in CLOSING.values():
            assert_identical(closing(ours)(args[0]), closing(linen)(args[0]))


NOISY = {
    "plain": lambda: nn.Dropout(0.5, deterministic=False),
    "remat": lambda: nn.remat(nn.Dropout)(0.5, deterministic=False),
    "jit": lambda: nn.jit(nn.Dropout)(0.5, deterministic=False),
    "vmap": lambda: nn.vmap(nn.Dropout, variable_axes={}, split_rngs={"dropout": True})(
        0.5, deterministic=False
    ),
    "deep": lambda: nn.Sequential([nn.Sequential([nn.Dropout(0.5, deterministic=False)])]),
}


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("jit", [True, False])
def test_a_stream_moves_on_by_one_with_each_call_that_uses_it(name, jit):
    module = NOISY[name]()
    model = bridge.ToNNX(module, nnx.Rngs(dropout=0))
    streams = nnx.clone(model.to_nnx__rngs)
    step = nnx.jit(lambda m, x: m(x)) if jit else lambda m, x: m(x)
    x = jnp.ones((4, 16))
    for n in range(1, 4):
        expected = module.apply({}, x, rngs={"dropout": streams.dropout()})
        assert_identical(step(model, x), expected)
        assert list(rng_counts(model).values()) == [n]


@pytest.mark.parametrize(
    ("around", "is_traced"),
    [
        *((name, True) for name in ("none", "remat", "vmap", "scan", "cond")),
        *((name, False) for name in ("none", "remat", "vmap")),
    ],
)
def test_a_layer_under_nn_jit_draws_after_a_deterministic_call(around, is_traced):
    """Flax keeps the counts of the first call that looked alike, whatever was asked for since."""
    module = LinenLayers(around)
    model = bridge.ToNNX(module, nnx.Rngs(params=0, dropout=1)).lazy_init(X, True)
    streams = nnx.clone(model.to_nnx__rngs)
    variables = model.linen_variables()
    call = lambda model, x: model(x, False)  # noqa: E731
    step = nnx.jit(call) if is_traced else call
    for _ in range(2):
        before = snapshot(model)
        model(X, True)
        assert snapshot(model) == before
        keys = {
            name: jax.random.fold_in(streams[name].key[...], streams[name].count[...])
            for name in ("params", "dropout")
        }
        assert_close(step(model, X), module.apply(variables, X, False, rngs=keys))
        streams.dropout()
        assert rng_counts(model.to_nnx__rngs) == rng_counts(streams)


def test_a_layer_under_nn_jit_draws_in_a_second_thread():
    """Flax keeps those counts for each thread, and JAX the compiled layer for all."""
    model = bridge.ToNNX(NoisyJit(), nnx.Rngs(dropout=1))
    model(X, False)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model, X, False).result()
    assert list(rng_counts(model).values()) == [2]
    stream = nnx.Rngs(dropout=1).fork().dropout
    stream()
    assert_identical(other, NoisyJit().apply({}, X, False, rngs={"dropout": stream()}))


MODULES = {
    "dense": lambda: (nn.Dense(3), X),
    "nested": lambda: (models.LinenMLP(), X),
    "setup": lambda: (models.LinenAutoencoder(), X),
    "noise": lambda: (models.LinenNoises(()), X),
    "dropout": lambda: (models.LinenDropout(deterministic=False), X),
    "scan": lambda: (models.LinenScanned(), X),
    "vmap": lambda: (models.LinenVmapped(), X),
    "remat": lambda: (nn.remat(models.LinenMLP)(), X),
    "rnn": lambda: (models.LinenRecurrent(), X),
    "attention": lambda: (nn.MultiHeadDotProductAttention(2), X[None]),
    "weights from two streams": lambda: (
        models.LinenApplies(
            lambda m, x: (
                x
                @ m.variable(
                    "buffers", "b", lambda: jax.random.normal(m.make_rng("noise"), (4, 3))
                ).value
                + nn.Dense(3)(x)
            )
        ),
        X,
    ),
}
KEYS = {
    "typed": lambda: jax.random.key(5),
    "legacy": lambda: jax.random.PRNGKey(5),
    "rbg": lambda: jax.random.key(5, impl="rbg"),
    "unsafe_rbg": lambda: jax.random.key(5, impl="unsafe_rbg"),
}


@pytest.mark.parametrize("name", MODULES)
def test_with_a_key_lazy_init_is_module_init_bit_for_bit(name):
    module, *args = MODULES[name]()
    key = jax.random.key(5)
    model = bridge.ToNNX(module, key).lazy_init(*args)
    assert_identical(model.linen_variables(), module.init(key, *args))


@pytest.mark.parametrize("kind", KEYS)
def test_every_kind_of_key_gives_the_values_of_module_init(kind):
    key = KEYS[kind]()
    module = models.LinenMLP()
    expected = module.init(key, X)
    assert_identical(bridge.ToNNX(module, key).lazy_init(X).linen_variables(), expected)
    late = bridge.ToNNX(module).lazy_init(X, rngs=key)
    assert_identical(late.linen_variables(), expected)


@pytest.mark.parametrize("name", MODULES)
def test_with_a_dict_of_keys_lazy_init_is_module_init_bit_for_bit(name):
    module, *args = MODULES[name]()
    keys = {n: jax.random.key(i) for i, n in enumerate(("params", "dropout", "noise"))}
    expected = module.init(keys, *args)
    assert_identical(bridge.ToNNX(module, keys).lazy_init(*args).linen_variables(), expected)
    late = bridge.ToNNX(module).lazy_init(*args, rngs=keys)
    assert_identical(late.linen_variables(), expected)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "seeds", [{"params": 0}, {"params": 0, "dropout": 1, "noise": 2}, {"default": 3}], ids=str
)
def test_with_rngs_initial_values_are_module_init_with_the_keys_of_a_fork(name, seeds):
    module, *args = MODULES[name]()
    rngs = nnx.Rngs(**seeds)
    fork = nnx.Rngs(**seeds).fork()
    keys = {"params" if n == "default" else n: fork[n]() for n in seeds}
    model = bridge.ToNNX(module, rngs).lazy_init(*args)
    assert_identical(model.linen_variables(), module.init(keys, *args))


def test_the_rngs_are_forked_as_flax_nnx_bridge_forks_them():
    rngs = nnx.Rngs(0, dropout=1)
    reference = nnx.Rngs(0, dropout=1)
    model = bridge.ToNNX(nn.Dense(3), rngs)
    fork = reference.fork()
    assert rng_counts(rngs) == rng_counts(reference)
    assert set(model.to_nnx__rngs) == set(fork)
    for name in fork:
        assert_identical(model.to_nnx__rngs[name].key.get_value(), fork[name].key.get_value())


def test_the_rngs_of_a_wrapper_can_be_replaced():
    model = bridge.ToNNX(models.LinenNoises(), nnx.Rngs(0)).lazy_init(X)
    first = model(X)
    model.to_nnx__rngs = nnx.Rngs(params=3, noise=4)
    second = model(X)
    assert not jnp.array_equal(first, second)
    model.to_nnx__rngs = nnx.Rngs(params=3, noise=4)
    assert_identical(model(X), second)
    model.to_nnx__rngs = None
    with pytest.raises(bridge.MissingRngError):
        model(X)


def test_without_rngs_there_is_no_rng_state():
    model = bridge.ToNNX(nn.Dense(3))
    model.lazy_init(X, rngs=KEY)
    assert not nnx.state(model, nnx.RngState)
    assert list(nnx.state(model)) == ["bias", "kernel"]
    assert model.to_nnx__rngs is None


def test_only_the_stream_that_is_asked_for_is_drawn_from_and_only_once():
    module = models.LinenNoises(("noise", "noise", "other"))
    model = bridge.ToNNX(module, nnx.Rngs(params=0, noise=1, other=2, unused=3)).lazy_init(X)
    before = rng_counts(model)
    model(X)
    after = rng_counts(model)
    drawn = {path[1]: after[path] - before[path] for path in after}
    assert drawn == {"params": 0, "noise": 1, "other": 1, "unused": 0}


def test_the_keys_of_a_call_are_those_of_linen_apply():
    module = models.LinenNoises(("noise", "other"))
    rngs = nnx.Rngs(params=0, noise=1, other=2)
    model = bridge.ToNNX(module, rngs)
    streams = nnx.clone(model.to_nnx__rngs)
    model.lazy_init(X)
    variables = model.linen_variables()
    outputs = []
    for _ in range(3):
        keys = {n: streams[n]() for n in ("noise", "other")}
        outputs.append(model(X))
        assert_identical(outputs[-1], module.apply(variables, X, rngs=keys))
    assert not jnp.array_equal(outputs[0], outputs[1])


PER_CALL = {
    "key": lambda: (jax.random.key(3), {"params": jax.random.key(3)}),
    "legacy key": lambda: (jax.random.PRNGKey(3), {"params": jax.random.PRNGKey(3)}),
    "dict": lambda: ({"noise": jax.random.key(3)}, {"noise": jax.random.key(3)}),
    "rngs": lambda: (nnx.Rngs(noise=3), {"noise": nnx.Rngs(noise=3).noise()}),
    "default": lambda: (nnx.Rngs(3), {"params": nnx.Rngs(3)()}),
}


@pytest.mark.parametrize("kind", PER_CALL)
def test_rngs_of_a_call_are_those_of_linen_apply(kind):
    module = models.LinenNoises()
    model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(X)
    given, expected = PER_CALL[kind]()
    before = rng_counts(model)
    output = model(X, rngs=given)
    assert rng_counts(model) == before
    assert_identical(output, module.apply(model.linen_variables(), X, rngs=expected))
    if isinstance(given, nnx.Rngs):
        assert list(rng_counts(given).values()) == [1]


def test_the_default_stream_serves_as_params():
    model = bridge.ToNNX(models.LinenNoises(), nnx.Rngs(0)).lazy_init(X)
    # The initial values were drawn from it.
    assert list(rng_counts(model).values()) == [1]
    model(X)
    assert list(rng_counts(model).values()) == [2]


class LinenTwoNoises(nn.Module):
    """Draws from streams of two names, below and in a lifted transform as `lift` says."""

    lift: str = "none"
    names: tuple[str, ...] = ("dropout", "noise")

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            dropout = {"none": nn.Dropout, "remat": nn.remat(nn.Dropout), "jit": nn.jit(nn.Dropout)}
            layer = dropout[self.lift](0.5, deterministic=False, rng_collection=name)
            x = layer(nn.Dense(16)(x))
        return x


@pytest.mark.parametrize("names", [("dropout", "noise"), ("noise", "dropout"), ("noise", "noise")])
def test_default_serves_every_stream_that_is_missing_as_an_nnx_rngs_does(names):
    module = LinenTwoNoises(names=names)
    x = jnp.ones((2, 4))
    model = bridge.ToNNX(module, nnx.Rngs(0, params=1))
    native = nnx.clone(model.to_nnx__rngs)
    model.lazy_init(x)
    variables = module.init({"params": native.params(), "dropout": KEY, "noise": KEY}, x)
    assert_identical(model.linen_variables(), variables)
    for _ in range(3):
        keys = {}
        for name in names:
            keys.setdefault(name, None)
        keys = {name: native[name]() for name in keys}
        assert_identical(model(x), module.apply(variables, x, rngs=keys))
        counts = {path[1]: count for path, count in rng_counts(model).items()}
        assert counts == {"default": int(native.default.count[...]), "params": 1}


@pytest.mark.parametrize("lift", ["remat", "jit"])
def test_default_serves_a_missing_dropout_stream_in_a_lifted_transform(lift):
    module = LinenTwoNoises(lift, ("dropout", "dropout"))
    x = jnp.ones((2, 4))
    model = bridge.ToNNX(module, nnx.Rngs(0, params=1)).lazy_init(x)
    native = nnx.clone(model.to_nnx__rngs)
    variables = model.linen_variables()
    for _ in range(2):
        keys = {"params": native.params(), "dropout": native.dropout()}
        assert_identical(model(x), module.apply(variables, x, rngs=keys))
        if lift == "jit":
            # It folds in every key that there is, and this model asks for none of `params`.
            native.params.count[...] -= 1


def test_default_serves_a_missing_stream_under_scan():
    module = models.LinenScanned()
    model = bridge.ToNNX(module, nnx.Rngs(0, params=1), mutable=["batch_stats"]).lazy_init(X)
    native = nnx.clone(model.to_nnx__rngs)
    keys = {"dropout": native.dropout()}
    variables = model.linen_variables()
    expected, _ = module.apply(variables, X, rngs=keys, mutable=["batch_stats"])
    assert_identical(model(X), expected)


def test_default_in_the_keys_of_a_call_serves_what_is_missing():
    module = LinenTwoNoises()
    x = jnp.ones((2, 4))
    model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(x)
    given = {"params": jax.random.key(1), "default": jax.random.key(2)}
    native = nnx.Rngs(**given)
    keys = {"dropout": native.dropout(), "noise": native.noise()}
    assert_identical(model(x, rngs=given), module.apply(model.linen_variables(), x, rngs=keys))


def test_no_key_of_default_comes_again_after_the_second_draw_alone():
    """A lifted transform takes the first along, and its body does not use it."""

    class Either(nn.Module):
        @nn.compact
        def __call__(self, x, both):
            quiet = nn.remat(nn.Dropout, static_argnums=(2,))(0.5)
            y = quiet(x, not both)
            return y, nn.Dropout(0.5, rng_collection="noise")(x, deterministic=False)

    model = bridge.ToNNX(Either(), nnx.Rngs(0, params=1))
    x = jnp.ones((8, 64))
    masks = [np.asarray(model(x, both)[1] != 0).tobytes() for both in (False, True, False, True)]
    masks.append(np.asarray(model(x, True)[0] != 0).tobytes())
    assert len(set(masks)) == len(masks)


def test_reseed_brings_back_the_first_run():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=nnx.Rngs(dropout=0))
    bridge.lazy_init(model, X)
    first, second = model(X), model(X)
    assert not jnp.array_equal(first, second)
    nnx.reseed(model, dropout=0)
    assert_identical(model(X), first)
    assert_identical(model(X), second)


def test_reseed_brings_back_the_first_run_of_a_mixed_model():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.linen = bridge.ToNNX(models.LinenDropout(deterministic=False), rngs)
            self.native = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.native(self.linen(x))

    model = Mixed(nnx.Rngs(params=0, dropout=1))
    bridge.lazy_init(model, X)
    nnx.reseed(model, params=5, dropout=6)
    first = model(X)
    model(X)
    nnx.reseed(model, params=5, dropout=6)
    assert_identical(model(X), first)


def test_a_key_is_not_drawn_again_in_the_first_call_after_lazy_init():
    """The init key of a plain key is the key itself; later draws are derived from it."""
    module = nn.Dropout(0.5, deterministic=False)
    key = jax.random.key(3)
    model = bridge.ToNNX(module, {"dropout": key}).lazy_init(X)
    first, second = model(X), model(X)
    assert not jnp.array_equal(first, second)
    assert not jnp.array_equal(first, module.apply({}, X, rngs={"dropout": key}))
    stream = nnx.Rngs(dropout=key)
    assert_identical(first, module.apply({}, X, rngs={"dropout": stream.dropout()}))


@pytest.mark.parametrize(
    "rngs",
    [0, "key", 1.5, object(), [jax.random.key(0)], jnp.ones(2), {"dropout": 3}, {1: KEY}, nnx.Rngs],
    ids=lambda r: type(r).__name__ + str(r)[:12],
)
@pytest.mark.parametrize("at_call", [True, False])
def test_rngs_of_a_wrong_type_are_refused(rngs, at_call):
    model = bridge.ToNNX(models.LinenNoises(), nnx.Rngs(0)).lazy_init(X)
    with pytest.raises(bridge.InvalidRngsError, match=r"ToNNX\(\w+\) expected rngs") as raised:
        model(X, rngs=rngs) if at_call else bridge.ToNNX(nn.Dense(3), rngs)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, flax_errors.InvalidRngError)


def test_a_missing_stream_names_the_streams_there_are():
    model = bridge.ToNNX.from_variables(
        models.LinenNoises(),
        models.LinenNoises().init({"params": KEY, "noise": KEY}, X),
        nnx.Rngs(dropout=0, zebra=1),
    )
    before = snapshot(model)
    with pytest.raises(bridge.MissingRngError, match=r"noise.*'dropout', 'zebra'") as raised:
        model(X)
    assert isinstance(raised.value, flax_errors.InvalidRngError)
    assert raised.value.streams == ("noise",)
    assert snapshot(model) == before


def test_lazy_init_without_any_key_raises_and_changes_nothing():
    model = bridge.ToNNX(nn.Dense(3))
    before = snapshot(model)
    with pytest.raises(bridge.MissingRngError, match=r"params.*no keys") as raised:
        model.lazy_init(X)
    assert isinstance(raised.value, flax_errors.InvalidRngError)
    assert snapshot(model) == before


def test_a_missing_stream_in_a_lifted_transform_is_refused():
    variables = models.LinenScanned(train=False).init(KEY, X)
    model = bridge.ToNNX.from_variables(models.LinenScanned(), variables)
    with pytest.raises(flax_errors.InvalidRngError):
        model(X, mutable=["batch_stats"])


def test_has_rng_is_answered_as_linen_answers_it_without_drawing():
    module = models.LinenApplies(lambda m: [m.has_rng(n) for n in ("params", "dropout", "x")])
    model = bridge.ToNNX(module, nnx.Rngs(0, dropout=1))
    assert model() == module.apply({}, rngs={"params": KEY, "dropout": KEY})
    assert list(rng_counts(model).values()) == [0, 0]


def test_split_rngs_gives_each_copy_its_own_dropout_mask():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), nnx.Rngs(dropout=0))

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None))
    def forward(model, x):
        return model(x)

    masks = forward(model, jnp.ones((8, 8)))
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 4


def test_values_are_the_same_under_jit_and_without():
    def build():
        return bridge.ToNNX(models.LinenMLP(), nnx.Rngs(0)).lazy_init(X)

    compiled, eager = (
        nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (nnx.jit(build)(), build())
    )
    assert_close(compiled, eager)

    def noise(model):
        return model(X) - model(X, rngs=nnx.Rngs(9))

    model, same = (bridge.ToNNX(models.LinenNoises(), nnx.Rngs(0)).lazy_init(X) for _ in range(2))
    assert_close(nnx.jit(noise)(model), noise(same))
    assert rng_counts(model) == rng_counts(same)


@pytest.mark.parametrize("rng_state", [True, False])
def test_a_stream_moves_on_only_if_a_wrapped_nnx_module_draws_from_it(rng_state):
    class Within(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = bridge.ToLinen(nnx.Dropout, (0.5,), rng_state=rng_state, name="inner")
            return layer(layer(x))

    module = Within()
    model = bridge.ToNNX(module, nnx.Rngs(params=0, dropout=1)).lazy_init(X)
    native = nnx.clone(model.to_nnx__rngs)
    before = rng_counts(model)
    model.eval()
    assert_identical(model(X), X)
    assert_identical(jax.jit(model.__call__)(X), X)
    assert rng_counts(model) == before
    model.train()
    for _ in range(2):
        variables = model.linen_variables()
        expected = module.apply(variables, X, rngs={"dropout": native.dropout()})
        assert_identical(model(X), expected)


SEVERAL = {
    "typed": jax.random.split(KEY),
    "legacy": jax.random.split(jax.random.PRNGKey(0)),
    "one of typed keys": jax.random.split(KEY)[:1],
    "a stream": {"params": KEY, "dropout": jax.random.split(KEY)},
}


@pytest.mark.parametrize("rngs", SEVERAL)
def test_several_keys_for_one_are_refused_where_they_are_given(rngs):
    with pytest.raises(bridge.InvalidRngsError, match="an array of keys"):
        bridge.ToNNX(nn.Dense(3), rngs=SEVERAL[rngs])
    model = bridge.ToNNX(models.LinenDropout(deterministic=False), nnx.Rngs(0)).lazy_init(X)
    with pytest.raises(bridge.InvalidRngsError, match="an array of keys"):
        model(X, rngs=SEVERAL[rngs])


def test_each_of_several_keys_makes_one_of_several_mapped_wrappers():
    @nnx.vmap
    def make(key):
        return bridge.ToNNX(nn.Dense(3), key).lazy_init(X)

    keys = jax.random.split(KEY)
    expected = [nn.Dense(3).init(key, X)["params"]["kernel"] for key in keys]
    np.testing.assert_allclose(make(keys).kernel[...], jnp.stack(expected), rtol=1e-6)
