"""lazy_init: creating variables from sample inputs, in models of every mixture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import freeze

import bridge
from tests import models
from tests.models import assert_close, assert_identical, leaf_paths, rng_counts, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)
ABSTRACT = jax.ShapeDtypeStruct((2, 4), jnp.float32)


class Mixed(nnx.Module):
    """Linen modules among native ones that change their state in a call."""

    def __init__(self, rngs):
        self.before = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linen = bridge.ToNNX(models.LinenMLP(), rngs=rngs)
        self.listed = nnx.List([bridge.ToNNX(nn.Dense(2), rngs=rngs)])
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, scale=1.0):
        self.seen[...] = self.seen[...] + 1
        x = self.dropout(self.norm(self.before(x)))
        return self.listed[0](self.linen(x)) * scale

    def only_linen(self, x):
        return self.linen(x)


def native_state(model):
    flat = nnx.to_flat_state(nnx.state(model))
    return {
        path: np.asarray(models._as_numpy(leaf.get_value()))
        for path, leaf in flat
        if path[0] not in ("linen", "listed") or "to_nnx__rngs" in path
    }


def has_variables(model, wrapper):
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    return any(p[: len(wrapper)] == wrapper and "to_nnx__rngs" not in p for p in paths)


def assert_same_native_state(model, reference):
    actual, expected = native_state(model), native_state(reference)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        if path[-3:] == ("to_nnx__rngs", "default", "count"):
            # A wrapper drew its initial values from this stream, and no key is to come twice.
            moved = value + has_variables(model, path[:-3])
            np.testing.assert_array_equal(actual[path], moved, err_msg=str(path))
        else:
            np.testing.assert_array_equal(actual[path], value, err_msg=str(path))


@pytest.mark.parametrize("how", ["function", "chained", "method of the class"])
@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_function_and_chained_method_give_what_linen_init_gives(how, inputs):
    module = models.LinenMLP()
    model = bridge.ToNNX(module, KEY)
    result = {
        "function": lambda: bridge.lazy_init(model, inputs),
        "chained": lambda: model.lazy_init(inputs),
        "method of the class": lambda: bridge.ToNNX.lazy_init(model, inputs),
    }[how]()
    assert result is model
    assert_identical(model.linen_variables(), module.init(KEY, X))


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_a_method_of_the_linen_module_initialises_what_it_needs(inputs):
    module = models.LinenAutoencoder()
    model = bridge.ToNNX(module, KEY)
    method = model.encode
    assert bridge.lazy_init(method, inputs) is method
    assert_identical(model.linen_variables(), module.init(KEY, X, method="encode"))
    assert sorted(nnx.state(model, nnx.Param)) == ["encoder"]


@pytest.mark.parametrize("method", ["encode", models.LinenAutoencoder.encode])
@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_method_is_a_keyword_of_lazy_init(method, inputs):
    module = models.LinenAutoencoder()
    model = bridge.lazy_init(bridge.ToNNX(module, KEY), inputs, method=method)
    assert_identical(model.linen_variables(), module.init(KEY, X, method="encode"))


def test_a_linen_method_called_init_can_be_named():
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(2)

        def initialize(self, x):
            return self.dense(x)

    model = bridge.lazy_init(bridge.ToNNX(Model(), KEY), X, method="initialize")
    assert_identical(model.linen_variables(), Model().init(KEY, X, method="initialize"))


def test_rngs_of_lazy_init_are_those_of_linen_init():
    module = models.LinenNoises()
    rngs = {"params": KEY, "noise": jax.random.key(1)}
    model = bridge.ToNNX(module, nnx.Rngs(0))
    before = rng_counts(model)
    model.lazy_init(X, rngs=rngs)
    assert_identical(model.linen_variables(), module.init(rngs, X))
    assert rng_counts(model) == before


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
@pytest.mark.parametrize("entry", ["model", "method"])
def test_native_siblings_are_as_native_construction_left_them(inputs, entry):
    """Defect 14: statistics of native siblings were updated."""
    model, reference = Mixed(nnx.Rngs(0)), Mixed(nnx.Rngs(0))
    identities = {p: id(v) for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    bridge.lazy_init(model if entry == "model" else model.only_linen, inputs)
    assert_same_native_state(model, reference)
    after = {p: id(v) for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    assert identities.items() <= after.items()
    assert set(vars(model)) == set(vars(reference))
    assert "Dense_0" in nnx.state(model)["linen"]
    assert ("kernel" in nnx.state(model)["listed"][0]) == (entry == "model")


@pytest.mark.parametrize("form", ["ref", "hijax"])
@pytest.mark.parametrize("entry", ["model", "method"])
def test_native_siblings_in_other_forms_stay_as_constructed(form, entry):
    with nnx.var_defaults(**{form: True}):
        model, reference = Mixed(nnx.Rngs(0)), Mixed(nnx.Rngs(0))
        bridge.lazy_init(model if entry == "model" else model.only_linen, X)
        assert_same_native_state(model, reference)


class SownApart(nnx.Intermediate):
    """A collection of its own for what is sown."""


@pytest.mark.parametrize("kind", [nnx.Intermediate, SownApart])
@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_what_a_native_sibling_sows_at_initialisation_is_not_kept(inputs, kind):
    class Sowing(Mixed):
        def __call__(self, x):
            self.sow(kind, "sown", x)
            return super().__call__(x)

    model = Sowing(nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match="sow"):
        bridge.lazy_init(model, inputs)
    assert not hasattr(model, "sown")
    assert_same_native_state(model, Sowing(nnx.Rngs(0)))


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_native_state_that_the_call_donates_to_a_program_is_still_there(inputs):
    """Regression: the model held the arrays that had been donated, and could not be used."""

    class Donating(Mixed):
        def __call__(self, x):
            run = nnx.jit(lambda module, x: module(x), donate_argnums=0)
            return self.listed[0](run(self.before, x))

    model, reference = Donating(nnx.Rngs(0)), Donating(nnx.Rngs(0))
    bridge.lazy_init(model, inputs)
    assert_same_native_state(model, reference)
    np.testing.assert_array_equal(model(X), reference.before(X) @ model.listed[0].kernel[...])


@pytest.mark.parametrize("of", [lambda x: 1.0, jnp.mean], ids=["known", "unknown"])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["bare", "jit"])
def test_shapes_leave_state_as_it_was_that_the_call_donates_and_replaces(of, wrap):
    def counted(seen, x):
        seen[...] = seen[...] + of(x)
        return x * seen

    class Replacing(Mixed):
        def __call__(self, x):
            run = wrap(nnx.jit(counted, donate_argnums=0))
            return self.listed[0](run(self.seen, x))

    model, reference = Replacing(nnx.Rngs(0)), Replacing(nnx.Rngs(0))
    bridge.lazy_init(model, ABSTRACT)
    assert_same_native_state(model, reference)
    expected = X * counted(nnx.BatchStat(jnp.zeros(())), jnp.ones(())) * of(X)
    np.testing.assert_allclose(model(X), expected @ model.listed[0].kernel[...], rtol=1e-6)


def test_state_that_an_inner_program_donates_is_what_it_has_made():
    def counted(seen, x):
        seen[...] = seen[...] + 1
        return x * 2

    class Nested(Mixed):
        def __call__(self, x):
            return self.listed[0](nnx.remat(nnx.jit(counted, donate_argnums=0))(self.seen, x))

    model = bridge.lazy_init(Nested(nnx.Rngs(0)), ABSTRACT)
    assert_identical(model.seen[...], jnp.ones(()))
    np.testing.assert_array_equal(model(X), (X * 2) @ model.listed[0].kernel[...])


def test_abstract_and_concrete_inputs_give_the_same_mixed_model():
    concrete = bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    abstract = bridge.lazy_init(Mixed(nnx.Rngs(0)), ABSTRACT)
    assert nnx.graphdef(concrete) == nnx.graphdef(abstract)
    assert_identical(nnx.state(abstract), nnx.state(concrete))


def test_reseed_after_lazy_init_brings_back_the_first_run():
    model = bridge.lazy_init(Mixed(nnx.Rngs(params=0, dropout=1)), X)
    first = model(X)
    nnx.reseed(model, params=0, dropout=1)
    fresh = bridge.lazy_init(Mixed(nnx.Rngs(params=0, dropout=1)), X)
    assert_identical(first, fresh(X))


def forward_count(inputs):
    calls = []

    def call(module, x):
        y = nn.Dense(3)(x)
        jax.debug.callback(lambda v: calls.append(v.shape), y)
        jax.pure_callback(
            lambda v: calls.append(v.shape) or v, jax.ShapeDtypeStruct((2, 3), jnp.float32), y
        )
        return y

    model = bridge.ToNNX(models.LinenApplies(call), KEY)
    model.lazy_init(inputs)
    jax.effects_barrier()
    return model, calls


def test_shapes_alone_compute_no_forward_pass():
    """Defect 14: ShapeDtypeStruct was rejected."""
    model, calls = forward_count(ABSTRACT)
    assert calls == []
    concrete, calls = forward_count(X)
    assert len(calls) >= 1
    assert_identical(model.linen_variables(), concrete.linen_variables())


def test_abstract_and_concrete_inputs_mix_in_any_kind_of_argument():
    module = models.LinenApplies(lambda _, a, b: nn.Dense(2)(a) + nn.Dense(2)(b["x"]) * b["s"])
    model = bridge.ToNNX(module, KEY).lazy_init(ABSTRACT, {"x": X, "s": 2.0})
    assert_identical(model.linen_variables(), module.init(KEY, X, {"x": X, "s": 2.0}))
    classifier = bridge.ToNNX(models.LinenClassifier(), KEY).lazy_init(x=ABSTRACT, train=False)
    expected = models.LinenClassifier().init(KEY, X, train=False)
    assert_identical(classifier.linen_variables(), expected)


def test_a_python_value_that_decides_the_structure_stays_concrete():
    def call(_, x, n):
        for _unused in range(n):
            x = nn.Dense(4)(x)
        return x

    module = models.LinenApplies(call)
    model = bridge.ToNNX(module, KEY).lazy_init(ABSTRACT, 2)
    assert_identical(model.linen_variables(), module.init(KEY, X, 2))


def test_a_variable_of_an_abstract_value_raises_and_changes_nothing():
    def call(module, x):
        nn.Dense(2)(x)
        module.variable("cache", "count", lambda: jnp.zeros(2))
        module.variable("cache", "largest", jnp.max, x)
        return module.variable("cache", "mean", jnp.mean, x).value

    model = bridge.ToNNX(models.LinenApplies(call), KEY)
    before = snapshot(model)
    with pytest.raises(flax_errors.LazyInitError) as caught:
        model.lazy_init(ABSTRACT)
    assert isinstance(caught.value, bridge.AbstractInputError)
    assert caught.value.paths == ("largest", "mean")
    assert "\n  - largest\n  - mean\n" in str(caught.value)
    assert snapshot(model) == before
    assert not hasattr(model, "Dense_0")
    model.lazy_init(X)
    np.testing.assert_allclose(model.mean.get_value(), X.mean())


FORWARDS = {
    "custom_jvp": lambda _, x: nn.Dense(2)(nn.relu(nn.Dense(4)(x))),
    "custom_vjp": lambda _, x: nn.Dense(2)(clipped(nn.Dense(4)(x))),
    "jit": lambda _, x: nn.Dense(2)(nn.jit(nn.Dense)(4)(x)),
    # Its program has two outputs: one depends on the input, one on the key.
    "jit of a kernel": lambda _, x: nn.jit(nn.Dense)(4, use_bias=False)(x),
    "remat": lambda _, x: nn.Dense(2)(nn.remat(nn.Dense)(4)(x)),
    "vmap": lambda _, x: nn.vmap(
        nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}
    )(3)(x),
    "scan": lambda _, x: nn.scan(
        nn.OptimizedLSTMCell, variable_broadcast="params", split_rngs={"params": False}
    )(4)(nn.OptimizedLSTMCell(4, parent=None).initialize_carry(KEY, (4,)), x),
    "jit of both": lambda _, x: nn.Dense(4)(jax.jit(lambda x, y: x + y)(x, jnp.ones((2, 4)))),
    "a program twice": lambda _, x: nn.Dense(4)(gelu_and_ones(gelu_and_ones(x)[0])[0]),
    "while": lambda _, x: nn.Dense(4)(jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, x)),
    "cond": lambda _, x: nn.Dense(4)(jax.lax.cond(True, jnp.sin, jnp.cos, x)),
    "known number": lambda _, x: nn.Dense(4 if jnp.arange(3.0).sum() > 2 else 5)(x),
    "known part": lambda m, x: nn.Dense(4)(
        x + m.variable("cache", "part", lambda: 0).value * gelu_and_ones(x)[0]
    ),
}


@jax.jit
def gelu_and_ones(x):
    return nn.gelu(x), jnp.ones(3)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_shapes_give_what_linen_makes_of_arrays_in_any_forward_pass(forward):
    module = models.LinenApplies(forward)
    model = bridge.ToNNX(module, KEY).lazy_init(ABSTRACT)
    assert_identical(model.linen_variables(), module.init(KEY, X))


@pytest.mark.parametrize("name", sorted(FORWARDS.keys() - {"known number"}))
def test_shapes_give_what_linen_makes_of_arrays_in_a_transform_too(name):
    module = models.LinenApplies(FORWARDS[name])

    def init(key):
        return bridge.ToNNX(module, key).lazy_init(ABSTRACT).linen_variables()

    assert_close(jax.jit(init)(KEY), jax.jit(module.init)(KEY, X))
    assert_close(jax.vmap(init)(KEY[None]), jax.vmap(module.init, (0, None))(KEY[None], X))


INITIALIZERS = {
    "shape": lambda x: jnp.ones(x.shape),
    "dtype": jnp.zeros_like,
    "output that no input reaches": lambda x: gelu_and_ones(x)[1],
    "abstract": lambda x: jnp.zeros(jax.eval_shape(jnp.sum, x).shape),
    "program": lambda x: jax.jit(lambda: jnp.arange(x.size))(),
}


@pytest.mark.parametrize("initializer", INITIALIZERS.values(), ids=INITIALIZERS)
@pytest.mark.parametrize("closes_over", [False, True])
def test_an_initializer_may_look_at_an_abstract_input(initializer, closes_over):
    def call(module, x):
        y = nn.Dense(3)(x)
        given = (lambda: initializer(x),) if closes_over else (initializer, x)
        module.variable("cache", "made", *given)
        module.param("drawn", nn.initializers.normal(), (2,))
        return nn.Dense(2)(y)

    module = models.LinenApplies(call)
    streams, reference = nnx.Rngs(7), nnx.Rngs(7)
    model = bridge.ToNNX(module, streams).lazy_init(ABSTRACT)
    assert_identical(
        model.linen_variables(), bridge.ToNNX(module, reference).lazy_init(X).linen_variables()
    )
    assert rng_counts(model) == rng_counts(bridge.ToNNX(module, nnx.Rngs(7)).lazy_init(X))
    assert_identical(
        bridge.ToNNX(module, KEY).lazy_init(ABSTRACT).linen_variables(), module.init(KEY, X)
    )


def test_a_variable_whose_initializer_closes_over_an_abstract_value_raises():
    def call(module, x):
        return module.variable("cache", "mean", lambda: jnp.mean(nn.Dense(2)(x))).value

    model = bridge.ToNNX(models.LinenApplies(call), KEY)
    with pytest.raises(bridge.AbstractInputError) as caught:
        model.lazy_init(ABSTRACT)
    assert caught.value.paths == ("mean",)


def test_shapes_compile_nothing_that_arrays_have_compiled():
    """Regression: JAX divided each compiled program and compiled the part for the variables."""
    compiled = []
    module = models.LinenApplies(lambda _, x: nn.Dense(7)(nn.LayerNorm()(x)))
    bridge.ToNNX(module, KEY).lazy_init(X)
    listener = lambda event, duration, **_: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        bridge.ToNNX(module, KEY).lazy_init(ABSTRACT)
        assert not [event for event in compiled if "backend_compile" in event]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_a_repeated_call_keeps_values_and_identity(inputs):
    """Defect 14: a repeated call overwrote the parameters."""
    model = bridge.ToNNX(models.LinenClassifier(), nnx.Rngs(0)).lazy_init(X, train=False)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(variable.get_value() + 1)
    model.BatchNorm_0["mean"].set_value(jnp.full(4, 5.0))
    before = snapshot(model)
    model.lazy_init(inputs, train=False)
    assert snapshot(model) == before


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_a_repeated_call_adds_only_what_is_missing(inputs):
    module = models.LinenAutoencoder()
    model = bridge.lazy_init(bridge.ToNNX(module, KEY).encode, X)
    model = model.__self__
    kernel = model.encoder["kernel"]
    kernel.set_value(jnp.ones((4, 2)))
    model.lazy_init(inputs)
    assert model.encoder["kernel"] is kernel
    assert_identical(kernel.get_value(), jnp.ones((4, 2)))
    assert model.decoder["kernel"].shape == (2, 3)
    expected = module.init(KEY, X)["params"]["decoder"]
    assert_identical(model.linen_variables()["params"]["decoder"], expected)


def test_pretrained_variables_are_kept_and_the_rest_is_initialised():
    module = models.LinenMLP()
    full = module.init(jax.random.key(1), X)
    given = freeze({"params": {"Dense_0": full["params"]["Dense_0"]}})
    model = bridge.ToNNX.from_variables(module, given, KEY).lazy_init(X)
    expected = module.init(KEY, X)["params"] | {"Dense_0": full["params"]["Dense_0"]}
    assert_identical(model.linen_variables(), {"params": expected})


def test_under_eval_shape_the_variables_are_abstract():
    abstract = nnx.eval_shape(lambda: bridge.lazy_init(Mixed(nnx.Rngs(0)), X))
    concrete = bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    assert leaf_paths(abstract) == leaf_paths(concrete)
    kernel = abstract.linen.Dense_0["kernel"].get_value()
    assert kernel == jax.ShapeDtypeStruct((5, 3), jnp.float32)


@pytest.mark.parametrize("transform", [nnx.jit, jax.jit], ids=["nnx", "jax"])
@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_under_jit_the_model_is_that_of_an_eager_call(transform, inputs):
    graphdef = nnx.graphdef(bridge.lazy_init(Mixed(nnx.Rngs(0)), X))

    if transform is nnx.jit:
        model = nnx.jit(lambda: bridge.lazy_init(Mixed(nnx.Rngs(0)), inputs))()
    else:
        state = jax.jit(lambda: nnx.state(bridge.lazy_init(Mixed(nnx.Rngs(0)), inputs)))()
        model = nnx.merge(graphdef, state)
    expected = bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    for path, leaf in nnx.to_flat_state(nnx.state(expected, nnx.Param)):
        actual = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))[path]
        np.testing.assert_allclose(actual.get_value(), leaf.get_value(), rtol=1e-5, atol=1e-6)
    assert rng_counts(model) == rng_counts(expected)
    model.eval()
    expected.eval()
    np.testing.assert_allclose(model(X), expected(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_initialising_a_given_model_inside_nnx_jit_reaches_it(inputs):
    model = Mixed(nnx.Rngs(0))

    @nnx.jit
    def initialize(model):
        bridge.lazy_init(model, inputs)

    initialize(model)
    assert leaf_paths(model) == leaf_paths(bridge.lazy_init(Mixed(nnx.Rngs(0)), X))


def test_under_nnx_vmap_every_copy_is_initialised_from_its_own_key():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def build(rngs, x):
        return bridge.lazy_init(bridge.ToNNX(nn.Dense(3), rngs), x)

    model = build(nnx.Rngs(0), X)
    assert model.kernel.shape == (3, 4, 3)
    assert len({np.asarray(k).tobytes() for k in model.kernel.get_value()}) == 3


class NNXVmapped(nnx.Module):
    """The guide's example."""

    def __init__(self, out_dim, vmap_axis_size, rngs):
        self.linen_dot = bridge.ToNNX(nn.Dense(out_dim, use_bias=False), rngs=rngs)
        self.vmap_axis_size = vmap_axis_size

    def __call__(self, x):
        @nnx.split_rngs(splits=self.vmap_axis_size)
        @nnx.vmap(in_axes=(0, 0), axis_size=self.vmap_axis_size)
        def vmap_fn(submodule, x):
            return submodule(x)

        return vmap_fn(self.linen_dot, x)


def test_the_guides_vmapped_model_initialises_and_runs():
    x = jax.random.normal(KEY, (4, 8))
    model = bridge.lazy_init(NNXVmapped(5, 4, rngs=nnx.Rngs(0)), x)
    assert model.linen_dot.kernel.shape == (4, 8, 5)
    assert len({np.asarray(k).tobytes() for k in model.linen_dot.kernel.get_value()}) == 4
    expected = jnp.einsum("bi,bio->bo", x, model.linen_dot.kernel.get_value())
    np.testing.assert_allclose(model(x), expected, rtol=1e-5)
    again = bridge.lazy_init(model, x)
    assert again is model
    np.testing.assert_allclose(model(x), expected, rtol=1e-5)


def test_a_wrapper_inside_nnx_scan_over_layers_is_initialised():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def build(rngs):
        return bridge.ToNNX(nn.Dense(4), rngs).lazy_init(X)

    layers = build(nnx.Rngs(0))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    expected = X
    for kernel in layers.kernel.get_value():
        expected = expected @ kernel
    np.testing.assert_allclose(forward(X, layers), expected, rtol=1e-5)


def test_a_shared_wrapper_is_initialised_once():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.a = bridge.ToNNX(nn.Dense(4), rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    for inputs in (X, ABSTRACT):
        model = bridge.lazy_init(Twice(KEY), inputs)
        assert model.a is model.b
        assert_identical(model.a.linen_variables(), nn.Dense(4).init(KEY, X))


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_failure_leaves_the_model_as_it_was(inputs, where):
    class Failing(Mixed):
        def __call__(self, x):
            if where == "before":
                raise ZeroDivisionError
            if where == "after":
                super().__call__(x)
                raise ZeroDivisionError
            return super().__call__(x)

    model = Failing(nnx.Rngs(0))
    if where == "inside":

        def fail(_, x):
            nn.Dense(2)(x)
            raise ZeroDivisionError

        model.listed = nnx.List([bridge.ToNNX(models.LinenApplies(fail), nnx.Rngs(1))])
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bridge.lazy_init(model, inputs)
        assert snapshot(model) == before
    # Nothing says any more that initialisation is going on.
    with pytest.raises(bridge.NotInitializedError):
        model.linen(X)


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_what_a_linen_module_sows_at_initialisation_is_not_kept(inputs):
    module = models.LinenSows()
    model = bridge.ToNNX(module, KEY).lazy_init(inputs)
    assert_identical(model.linen_variables(), {"params": module.init(KEY, X)["params"]})


def test_at_initialisation_the_module_knows_it_and_updates_nothing():
    module = models.LinenCounter()
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    assert int(model.count.get_value()) == 0
    seen = []
    asking = models.LinenApplies(lambda m: seen.append(m.is_initializing()))
    bridge.lazy_init(bridge.ToNNX(asking))()
    assert seen == [True, False]


@pytest.mark.parametrize(
    "given",
    [nn.Dense(3), nn.Dense, lambda x: x, nnx.Module, 3, nnx.Rngs.fork],
    ids=["Linen module", "Linen class", "function", "NNX class", "number", "unbound method"],
)
def test_what_is_no_nnx_module_or_method_is_refused(given):
    with pytest.raises(bridge.InvalidModuleError, match="callable NNX module"):
        bridge.lazy_init(given, X)


def test_a_module_that_cannot_be_called_is_refused():
    class Plain(nnx.Module):
        pass

    with pytest.raises(bridge.InvalidModuleError, match="Plain"):
        bridge.lazy_init(Plain(), X)


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
def test_lazy_init_works_in_tree_mode(inputs):
    with nnx.set_graph_mode(False):
        model = bridge.lazy_init(Mixed(nnx.Rngs(0)), inputs)
        assert leaf_paths(model) == leaf_paths(bridge.lazy_init(Mixed(nnx.Rngs(0)), X))
        model.eval()
        assert model(X).shape == (2, 2)


def test_modules_named_like_methods_of_the_wrapper_can_be_initialised():
    model = bridge.ToNNX(models.LinenNamed("lazy_init"), KEY)
    assert model.lazy_init(X) is model
    assert model.lazy_init(ABSTRACT) is model
    assert bridge.lazy_init(model, X) is model


class Written(nn.Module):
    """Writes statistics in training, and sows."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
        self.sow("intermediates", "x", x)
        return x


class PassesMutable(nnx.Module):
    """A model that passes `mutable` by itself, as flax.nnx.bridge asks for."""

    def __init__(self, mutable, *, rngs):
        self.inner = bridge.ToNNX(Written(), rngs=rngs)
        self.mutable = nnx.static(mutable)

    def __call__(self, x):
        return self.inner(x, mutable=self.mutable)


MUTABLES = [["batch_stats"], ("batch_stats", "intermediates"), "batch_stats", True, False, []]


@pytest.mark.parametrize("inputs", [X, ABSTRACT], ids=["concrete", "abstract"])
@pytest.mark.parametrize("mutable", MUTABLES, ids=str)
def test_mutable_limits_nothing_while_variables_are_created(mutable, inputs):
    expected = Written().init(KEY, X)
    model = PassesMutable(mutable, rngs=nnx.Rngs(params=0))
    bridge.lazy_init(model, inputs)
    wanted = jax.tree.map(jnp.shape, expected)
    assert jax.tree.map(jnp.shape, model.inner.linen_variables()) == wanted
    assert_identical(model.inner.linen_variables()["batch_stats"], expected["batch_stats"])
    wrapper = bridge.ToNNX(Written(), KEY).lazy_init(inputs, mutable=mutable)
    assert_identical(wrapper.linen_variables(), expected)
    wrapper = bridge.ToNNX(Written(), KEY, mutable=mutable).lazy_init(inputs)
    assert_identical(wrapper.linen_variables(), expected)


@pytest.mark.parametrize("mutable", [["batch_stats"], False], ids=str)
def test_mutable_limits_nothing_in_the_init_of_a_linen_program(mutable):
    module = bridge.to_linen(PassesMutable, mutable)
    variables = module.init({"params": KEY}, X)
    wanted = jax.tree.map(jnp.shape, Written().init(KEY, X))
    assert {c: jax.tree.map(jnp.shape, variables[c]["inner"]) for c in wanted} == wanted


class CreatesMore(nnx.Module):
    """Creates native state when it is called first, in an attribute, a dict, a list and a None."""

    def __init__(self, axis_name, rngs):
        self.before = nnx.BatchStat(jnp.zeros(()))
        self.wrapped = bridge.ToNNX(nn.Dense(3), rngs=rngs)
        self.norm = nnx.BatchNorm(3, axis_name=axis_name, rngs=rngs)
        self.by_name = nnx.data({"old": self.before})
        self.items = nnx.List([self.before])
        self.late = None
        self.is_built = False

    def __call__(self, x):
        self.before[...] += 1
        if not self.is_built:
            self.is_built = True
            self.cache = nnx.Cache(jnp.arange(3.0))
            self.by_name["new"] = nnx.Cache(jnp.ones(2))
            self.items.append(nnx.Cache(jnp.ones(4)))
            self.late = nnx.data(nnx.Dict(again=self.cache, first=self.before))
        return self.norm(self.wrapped(x)) * self.cache[...].sum()


@pytest.mark.parametrize("of", [lambda m: m, lambda m: m.__call__], ids=["module", "method"])
@pytest.mark.parametrize("axis_name", [None, "batch"])
@pytest.mark.parametrize("is_abstract", [False, True])
def test_initialisation_needs_no_axis_bound_and_creates_native_state_too(
    is_abstract, axis_name, of
):
    x = jnp.arange(6.0).reshape(2, 3)
    wanted = CreatesMore(None, nnx.Rngs(0))
    bridge.lazy_init(wanted, x)
    model = CreatesMore(axis_name, nnx.Rngs(0))
    before, kept = model.before, nnx.state(model, nnx.BatchStat)
    given = jax.ShapeDtypeStruct(x.shape, x.dtype) if is_abstract else x
    bridge.lazy_init(of(model), given)
    assert_identical(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(wanted)))
    assert_identical(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), nnx.to_pure_dict(kept))
    assert model.before is before
    assert model.items[0] is before
    assert model.late.first is before
    assert model.late.again is model.cache
    assert model.is_built
    y = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), out_axes=0, axis_name="batch")
    if axis_name is None:
        y = nnx.jit(lambda m, x: m(x))
    model.eval()
    wanted.eval()
    np.testing.assert_allclose(y(model, x), wanted(x), rtol=1e-5)


def test_an_axis_that_no_module_names_has_to_be_bound_around_lazy_init():
    class Literal(nnx.Module):
        def __init__(self):
            self.wrapped = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.lax.pmean(self.wrapped(x), "batch")

    with pytest.raises(NameError, match="batch"):
        bridge.lazy_init(Literal(), jnp.ones((1, 3)))

    def init(x):
        return nnx.state(bridge.lazy_init(Literal(), x))

    state = jax.vmap(init, axis_name="batch", out_axes=None)(jnp.ones((2, 1, 3)))
    assert state["wrapped"]["kernel"].shape == (3, 3)


def test_a_name_error_of_the_model_itself_is_raised_and_leaves_no_trace():
    class Wrong(nnx.Module):
        def __init__(self):
            self.wrapped = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.wrapped(x)
            return nobody  # noqa: F821

    model = Wrong()
    before = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(NameError, match="nobody"):
        bridge.lazy_init(model, jnp.ones((1, 3)))
    assert_identical(nnx.to_pure_dict(nnx.state(model)), before)
