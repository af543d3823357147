"""`ToLinen`: init, apply, collections, and equality with the native NNX computation."""

import contextlib
import inspect
import threading
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state

import bridge
from tests.models import NnxDropped, NnxNormed, NnxStack, assert_close, assert_identical

KEY = jax.random.key(0)
# Flax prefers nnx.capture since 0.12, and programs in the wild sow all the same.
sows = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")


class MLP(nnx.Module):
    def __init__(self, width, *, rngs):
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.second = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class Attention(nnx.Module):
    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)


class Recurrent(nnx.Module):
    def __init__(self, *, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.rnn(x)


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class Tied(nnx.Module):
    def __init__(self, *, rngs):
        self.encoder = nnx.Linear(3, 3, rngs=rngs)
        self.decoder = self.encoder

    def __call__(self, x):
        return self.decoder(self.encoder(x))


class Counting(nnx.Module):
    """Holds a count that the call raises, and a parameter."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.array(2.0))
        self.calls = Count(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.scale


class Count(nnx.Variable):
    pass


class Lazy(nnx.Module):
    """Creates a Variable in its first call."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        if not hasattr(self, "mean"):
            self.mean = nnx.BatchStat(jnp.zeros(3))
        self.mean[...] = self.mean[...] + y.mean(0)
        return y


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", y)
        return y


class BareArray(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.offset = jnp.arange(3.0)

    def __call__(self, x):
        return self.linear(x) + self.offset[None]


MODELS = {
    "MLP": (MLP, (5,), (4, 3)),
    "BatchNorm": (NnxNormed, (), (4, 3)),
    "attention": (Attention, (), (2, 5, 4)),
    "nnx.List": (NnxStack, (3,), (4, 3)),
    "LSTM": (Recurrent, (), (2, 3, 3)),
    "Dropout": (Dropped, (), (4, 3)),
    "tied weights": (Tied, (), (4, 3)),
}


def inputs(shape):
    return jax.random.normal(jax.random.key(7), shape)


@pytest.fixture(params=MODELS)
def case(request):
    """(class, constructor arguments, sample input)."""
    cls, args, shape = MODELS[request.param]
    return cls, args, inputs(shape)


def numbers(array):
    """The array, or the numbers in it if it is a typed key."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def nnx_values(module):
    """Value by path, of all of a module's state."""
    return {path: v.get_value() for path, v in nnx.to_flat_state(nnx.state(module))}


def linen_values(variables):
    """Value by path without the collection."""
    unboxed = nn.unbox({c: tree for c, tree in variables.items() if c != "nnx"})
    flat = flax.traverse_util.flatten_dict(unboxed)
    return {path[1:]: value for path, value in flat.items()}


def equations(function, *args):
    """Primitive and output avals of all equations, those of inner programs in place."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append((eqn.primitive.name, tuple(str(v.aval) for v in eqn.outvars)))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    walk(getattr(inner, "jaxpr", inner))

    def is_jaxpr(x):
        return isinstance(x, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def test_init_gives_bit_for_bit_the_state_of_native_construction(case):
    cls, args, x = case
    variables = bridge.to_linen(cls, *args).init(KEY, x)
    native = cls(*args, rngs=nnx.Rngs(KEY))
    expected = nnx_values(native)
    found = linen_values(variables)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert_identical(found[path], value)


def test_init_with_output_gives_the_output_of_the_native_call(case):
    cls, args, x = case
    y, _ = bridge.to_linen(cls, *args).init_with_output(KEY, x)
    assert_identical(y, cls(*args, rngs=nnx.Rngs(KEY))(x))


def test_the_variables_are_collections_by_type_and_one_definition():
    variables = bridge.to_linen(NnxNormed).init(KEY, jnp.ones((4, 3)))
    assert set(variables) == {"params", "batch_stats", "nnx"}
    assert set(variables["params"]) == {"linear", "norm"}
    assert set(variables["params"]["norm"]) == {"scale", "bias"}
    assert set(variables["batch_stats"]["norm"]) == {"mean", "var"}
    assert list(variables["nnx"]) == ["graphdef"]
    assert isinstance(variables["nnx"]["graphdef"], nnx.GraphDef)
    assert jax.tree.leaves(variables["nnx"]) == []


def test_init_stores_batch_statistics_as_constructed():
    variables = bridge.to_linen(NnxNormed).init(KEY, inputs((4, 3)))
    np.testing.assert_array_equal(variables["batch_stats"]["norm"]["mean"], jnp.zeros(4))
    np.testing.assert_array_equal(variables["batch_stats"]["norm"]["var"], jnp.ones(4))


def test_init_stores_what_the_call_creates():
    x = inputs((4, 3))
    variables = bridge.to_linen(Lazy).init(KEY, x)
    assert variables["batch_stats"]["mean"].shape == (3,)
    model = bridge.to_linen(Lazy)
    y, updates = model.apply(variables, x, mutable=["batch_stats"])
    native = Lazy(rngs=nnx.Rngs(KEY))
    native.mean = nnx.BatchStat(variables["batch_stats"]["mean"])
    assert_identical(y, native(x))
    assert_identical(updates["batch_stats"]["mean"], native.mean.get_value())


def test_init_stores_the_cache_that_a_decoding_call_creates():
    class Decoder(nnx.Module):
        def __init__(self, *, rngs):
            self.attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)

        def __call__(self, x):
            if self.attention.cached_key is None:
                self.attention.init_cache((1, 3, 4))
            return self.attention(x)

    x = inputs((1, 1, 4))
    model = bridge.to_linen(Decoder)
    variables = model.init(KEY, x)
    assert set(variables["cache"]["attention"]) == {"cached_key", "cached_value", "cache_index"}
    assert variables["cache"]["attention"]["cached_key"].shape == (1, 3, 2, 2)
    native = Decoder(rngs=nnx.Rngs(KEY))
    native(x)
    for step in (1, 2):
        y, updates = model.apply(variables, x + step, mutable=["cache"])
        assert_identical(y, native(x + step))
        variables = {**variables, **updates}
        assert int(variables["cache"]["attention"]["cache_index"]) == step + 1


@pytest.mark.parametrize("case", ["BatchNorm", "attention", "Dropout"], indirect=True)
def test_init_under_jit_gives_the_variables_of_eager_init_up_to_rounding(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    eager, jitted = model.init(KEY, x), jax.jit(model.init)(KEY, x)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert_close(numbers(a), numbers(b))


def test_init_under_eval_shape_gives_the_structure_of_real_init(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    abstract, real = jax.eval_shape(model.init, KEY, x), model.init(KEY, x)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
        lambda a: (a.shape, a.dtype), real
    )


def test_init_constructs_the_module_once():
    constructed = []

    class Counted(nnx.Module):
        def __init__(self, *, rngs):
            constructed.append(1)
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return x * self.w

    bridge.to_linen(Counted).init(KEY, jnp.ones(2))
    assert constructed == [1]


@pytest.mark.parametrize("given", [("first",), ("first", "second")])
def test_a_call_that_may_create_keeps_the_variables_that_are_given(given):
    """As Linen's own `param` does, `init` fills in what is missing."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(MLP, 5, name="mlp")(x)

    x = inputs((4, 3))
    fresh = Outer().init(KEY, x)["params"]["mlp"]
    kept = {name: jax.tree.map(lambda a: a + 1, fresh[name]) for name in given}

    def initialize(scope, x):
        return Outer(parent=scope)(x)

    y, variables = flax.core.init(initialize)(KEY, x)
    assert_identical(variables["params"]["mlp"], fresh)
    scope = flax.core.Scope(
        {"params": {"mlp": kept}},
        rngs={"params": flax.core.scope.LazyRng.create(KEY)},
        mutable=True,
        flags={"initializing": True},
    )
    y = initialize(scope, x)
    found = flax.core.unfreeze(scope.variables()["params"]["mlp"])
    assert_identical(found, {**fresh, **kept})
    native = MLP(5, rngs=nnx.Rngs(0))
    for name, leaves in found.items():
        nnx.update(getattr(native, name), leaves)
    assert_identical(y, native(x))


@pytest.mark.parametrize("calls", [2, 3])
def test_a_shared_module_called_again_keeps_its_first_initialisation(calls):
    class Shared(nn.Module):
        def setup(self):
            self.layer = bridge.to_linen(nnx.Linear, 3, 3)

        def __call__(self, x):
            for _ in range(calls):
                x = self.layer(x)
            return x

    x = inputs((4, 3))
    y, variables = Shared().init_with_output(KEY, x)
    assert_identical(y, Shared().apply(variables, x))
    native = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    native.kernel[...] = variables["params"]["layer"]["kernel"]
    expected = x
    for _ in range(calls):
        expected = native(expected)
    assert_identical(y, expected)


def test_a_shared_module_that_draws_keys_needs_no_stored_rng_state():
    class Shared(nn.Module):
        def setup(self):
            self.layer = bridge.ToLinen(NnxDropped, rng_state=False)

        def __call__(self, x):
            return self.layer(self.layer(x))

    x = inputs((4, 3))
    variables = Shared().init(KEY, x)
    assert set(variables) == {"params", "nnx"}


def test_map_variables_sees_the_variables_that_the_module_uses():
    """The mapped weights are those that both init and apply compute with."""

    def transpose(variables):
        return jax.tree.map(jnp.transpose, variables)

    mapped = nn.map_variables(
        bridge.ToLinen,
        "params",
        trans_in_fn=transpose,
        trans_out_fn=transpose,
        init=True,
        mutable=True,
    )
    x = inputs((4, 3))
    model = mapped(nnx.Linear, args=(3, 5), kwargs={"use_bias": False})
    y, variables = model.init_with_output(KEY, x)
    assert variables["params"]["kernel"].shape == (5, 3)
    assert_identical(y, model.apply(variables, x))
    np.testing.assert_allclose(y, x @ variables["params"]["kernel"].T, rtol=1e-5)


def test_apply_gives_bit_for_bit_the_output_of_the_native_call(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    variables = model.init(KEY, x)
    y, updates = model.apply(variables, x, mutable=["batch_stats", "RngCount", "RngKey"])
    native = cls(*args, rngs=nnx.Rngs(KEY))
    assert_identical(y, native(x))
    after = linen_values({**variables, **updates})
    for path, value in nnx_values(native).items():
        assert_identical(after[path], value)


@pytest.mark.parametrize("with_graphdef", [True, False])
def test_apply_has_the_equations_of_the_native_call_and_no_more(case, with_graphdef):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    variables = model.init(KEY, x)
    if not with_graphdef:
        del variables["nnx"]
    graphdef, state = nnx.split(cls(*args, rngs=nnx.Rngs(KEY)))

    def native(state, x):
        module = nnx.merge(graphdef, state)
        y = module(x)
        return y, nnx.state(module)

    def wrapped(variables, x):
        return model.apply(variables, x, mutable=["batch_stats", "RngCount"])

    assert equations(wrapped, variables, x) == equations(native, state, x)


def test_init_has_the_equations_of_construction_and_call_and_no_more(case):
    cls, args, x = case

    def native(key, x):
        module = cls(*args, rngs=nnx.Rngs(key))
        state = nnx.state(module)
        return module(x), state

    wrapped = bridge.to_linen(cls, *args).init_with_output
    assert sorted(equations(wrapped, KEY, x)) == sorted(equations(native, KEY, x))


def test_apply_never_runs_an_initializer():
    calls = []

    def counted(key, shape, dtype=jnp.float32):
        calls.append(shape)
        return jnp.ones(shape, dtype)

    model = bridge.to_linen(nnx.Linear, 3, 2, kernel_init=counted)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    assert calls == [(3, 2)]
    for _ in range(3):
        model.apply(variables, x)
    jax.jit(model.apply)(variables, x)
    assert calls == [(3, 2)]


def test_apply_without_the_definition_runs_initializers_abstractly_once():
    values = []

    def counted(key, shape, dtype=jnp.float32):
        values.append(key)
        return jax.random.normal(key, shape, dtype)

    model = bridge.to_linen(nnx.Linear, 3, 2, kernel_init=counted)
    x = inputs((4, 3))
    variables = {"params": model.init(KEY, x)["params"]}
    values.clear()
    for _ in range(3):
        model.apply(variables, x)
    assert len(values) == 1
    assert isinstance(values[0], jax.core.Tracer)


def test_updates_come_back_only_for_mutable_collections():
    model = bridge.to_linen(NnxNormed)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    _, updates = model.apply(variables, x, mutable=["batch_stats"])
    assert list(updates) == ["batch_stats"]
    native = NnxNormed(rngs=nnx.Rngs(KEY))
    native(x)
    assert_identical(updates["batch_stats"]["norm"]["mean"], native.norm.mean.get_value())
    assert_identical(updates["batch_stats"]["norm"]["var"], native.norm.var.get_value())


@pytest.mark.parametrize(
    "mutable", [True, ["batch_stats"], "batch_stats", flax.core.DenyList("params")]
)
def test_every_form_of_mutable_keeps_the_same_update(mutable):
    model = bridge.to_linen(NnxNormed)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    y, updates = model.apply(variables, x, mutable=mutable)
    native = NnxNormed(rngs=nnx.Rngs(KEY))
    assert_identical(y, native(x))
    assert_identical(updates["batch_stats"]["norm"]["mean"], native.norm.mean.get_value())


def test_apply_with_everything_mutable_may_initialise_as_linen_modules_may():
    x = inputs((4, 3))
    model = bridge.to_linen(MLP, 5)
    y, variables = model.apply({}, x, mutable=True, rngs={"params": KEY})
    assert_identical(y, MLP(5, rngs=nnx.Rngs(KEY))(x))
    assert_identical(variables["params"], model.init(KEY, x)["params"])


def test_an_update_of_a_custom_variable_goes_to_its_collection():
    model = bridge.to_linen(Counting)
    variables = model.init(KEY, jnp.ones(()))
    assert int(variables["Count"]["calls"]) == 0
    for expected in (1, 2, 3):
        _, updates = model.apply(variables, jnp.ones(()), mutable=["Count"])
        variables = {**variables, **updates}
        assert int(variables["Count"]["calls"]) == expected


def test_a_parameter_that_a_call_changes_comes_back():
    class Normalizing(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.array([3.0, 4.0]))

        def __call__(self, x):
            self.w[...] = self.w[...] / 5.0
            return x * self.w

    model = bridge.to_linen(Normalizing)
    variables = model.init(KEY, jnp.ones(2))
    np.testing.assert_array_equal(variables["params"]["w"], [3.0, 4.0])
    _, updates = model.apply(variables, jnp.ones(2), mutable=["params"])
    np.testing.assert_array_equal(updates["params"]["w"], jnp.array([3.0, 4.0]) / 5.0)


def test_tied_weights_are_stored_once():
    variables = bridge.to_linen(Tied).init(KEY, jnp.ones((4, 3)))
    assert len(jax.tree.leaves(variables["params"])) == 2


@sows
@pytest.mark.parametrize("with_graphdef", [True, False])
def test_sown_values_come_back_and_may_be_passed_in_again(with_graphdef):
    model = bridge.to_linen(Sowing)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    assert "intermediates" not in variables
    if not with_graphdef:
        del variables["nnx"]
    y, sown = model.apply(variables, x, mutable=["intermediates"])
    native = Sowing(rngs=nnx.Rngs(KEY))
    assert_identical(y, native(x))
    assert_identical(sown["intermediates"]["hidden"], native.hidden.get_value())
    again, more = model.apply({**variables, **sown}, 2 * x, mutable=["intermediates"])
    assert_identical(again, native(2 * x))
    assert_identical(more["intermediates"]["hidden"], native.hidden.get_value())
    assert len(more["intermediates"]["hidden"]) == 2


@sows
def test_sown_values_may_be_passed_in_where_they_are_not_mutable():
    model = bridge.to_linen(Sowing)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    y, sown = model.apply(variables, x, mutable=["intermediates"])
    assert_identical(model.apply({**variables, **sown}, x), y)


@sows
def test_a_call_that_sows_where_nothing_is_mutable_keeps_nothing():
    model = bridge.to_linen(Sowing)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    y, updates = model.apply(variables, x, mutable=["batch_stats"])
    assert_identical(y, model.apply(variables, x))
    assert dict(updates) == {}


def test_what_one_method_creates_another_reads_as_a_variable_of_its_type():
    seen = []

    class Remembering(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return x * self.w

        def remember(self, x):
            self.memory = nnx.Cache(x)

        def recall(self):
            seen.append(type(self.memory))
            return self.memory + self.w

    model = bridge.ToLinen(Remembering, strict=True)
    variables = model.init(KEY, jnp.ones(2))
    assert set(variables) == {"params", "nnx"}
    _, created = model.apply(variables, 4 * jnp.ones(2), nnx_method="remember", mutable=["cache"])
    np.testing.assert_array_equal(created["cache"]["memory"], [4.0, 4.0])
    recalled = model.apply({**variables, **created}, nnx_method="recall")
    np.testing.assert_array_equal(recalled, [5.0, 5.0])
    assert seen == [nnx.Cache]


def test_state_created_in_the_call_needs_no_definition():
    model = bridge.to_linen(Lazy)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    expected = model.apply(variables, x, mutable=["batch_stats"])
    del variables["nnx"]
    assert_identical(model.apply(variables, x, mutable=["batch_stats"]), expected)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, lambda f: lambda *a: jax.eval_shape(f, *a)])
def test_a_bare_array_is_in_one_fixed_collection_however_init_is_run(run):
    """Regression: it was in a collection `ArrayImpl`, and `DynamicJaxprTracer` under jit."""
    variables = run(bridge.to_linen(BareArray).init)(KEY, jnp.ones((4, 3)))
    assert set(variables) == {"params", "nnx_arrays", "nnx"}
    assert variables["nnx_arrays"]["offset"].shape == (3,)


@pytest.mark.parametrize("with_graphdef", [True, False])
def test_a_bare_array_is_read_from_the_variables(with_graphdef):
    model = bridge.to_linen(BareArray)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    variables["nnx_arrays"] = {"offset": jnp.full(3, 9.0)}
    if not with_graphdef:
        del variables["nnx"]
    native = BareArray(rngs=nnx.Rngs(KEY))
    native.offset = jnp.full(3, 9.0)
    assert_identical(model.apply(variables, x), native(x))


def test_a_bare_array_that_a_call_replaces_comes_back():
    class Moving(nnx.Module):
        def __init__(self, *, rngs):
            self.at = jnp.zeros(2)

        def __call__(self, x):
            self.at = self.at + x
            return self.at

    model = bridge.to_linen(Moving)
    variables = model.init(KEY, jnp.ones(2))
    np.testing.assert_array_equal(variables["nnx_arrays"]["at"], [0.0, 0.0])
    for step in (1.0, 2.0):
        y, updates = model.apply(variables, jnp.ones(2), mutable=["nnx_arrays"])
        np.testing.assert_array_equal(y, [step, step])
        np.testing.assert_array_equal(updates["nnx_arrays"]["at"], [step, step])
        variables = {**variables, **updates}


def test_a_bare_array_traced_at_init_is_no_static_attribute():
    """The variables of a jitted init can be used outside of it."""
    model = bridge.to_linen(BareArray)
    x = inputs((4, 3))
    variables = jax.jit(model.init)(KEY, x)
    # The compiled program may round initial values otherwise than the eager one.
    assert_close(model.apply(variables, x), model.apply(model.init(KEY, x), x))


class Annotated(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones((3, 2)), note="n")

    def __call__(self, x):
        return x @ self.w


def test_metadata_comes_in_a_box_by_default():
    variables = bridge.to_linen(Annotated).init(KEY, jnp.ones((4, 3)))
    box = variables["params"]["w"]
    assert isinstance(box, bridge.NNXMeta)
    assert box.var_type is nnx.Param
    assert box.metadata["note"] == "n"


def test_no_metadata_function_means_bare_values():
    model = bridge.to_linen(Annotated, metadata_fn=None)
    variables = model.init(KEY, jnp.ones((4, 3)))
    assert isinstance(variables["params"]["w"], jax.Array)
    np.testing.assert_array_equal(model.apply(variables, jnp.ones((4, 3))), jnp.full((4, 2), 3.0))


def test_a_custom_metadata_function_makes_the_leaves():
    def partitioned(variable):
        return nn.Partitioned(variable.get_value(), ("rows", "columns"))

    model = bridge.ToLinen(
        nnx.Linear, args=(3, 2), kwargs={"use_bias": False}, metadata_fn=partitioned
    )
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    assert isinstance(variables["params"]["kernel"], nn.Partitioned)
    assert variables["params"]["kernel"].names == ("rows", "columns")
    assert_identical(
        model.apply(variables, x), nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(KEY))(x)
    )


def test_a_box_that_is_there_stays_when_its_value_is_updated():
    class Moving(nnx.Module):
        def __init__(self, *, rngs):
            self.at = nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            self.at[...] += x
            return self.at[...]

    model = bridge.to_linen(Moving)
    boxed = {"batch_stats": {"at": nn.Partitioned(jnp.zeros(2), ("rows",))}}
    _, updates = model.apply(boxed, jnp.ones(2), mutable=["batch_stats"])
    box = updates["batch_stats"]["at"]
    assert isinstance(box, nn.Partitioned)
    assert box.names == ("rows",)
    np.testing.assert_array_equal(box.value, [1.0, 1.0])


@pytest.mark.parametrize("box", [lambda v: nn.Partitioned(v, ("a", "b")), lambda v: v])
def test_boxed_and_bare_variables_are_read_alike(box):
    model = bridge.to_linen(nnx.Linear, 3, 2, use_bias=False)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    expected = model.apply(variables, x)
    variables["params"]["kernel"] = box(variables["params"]["kernel"])
    assert_identical(model.apply(variables, x), expected)


def test_wrappers_are_hashable_and_equal_by_value():
    def make(**changes):
        kwargs = {"out_features": 3, "kernel_init": nnx.initializers.ones, **changes}
        return bridge.to_linen(nnx.Linear, 2, **kwargs)

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(out_features=4)
    assert len({make(), make(), make(out_features=4)}) == 2


def test_equal_wrappers_share_one_compiled_program():
    traces = []

    @jax.jit
    def run(variables, x):
        traces.append(1)
        return bridge.to_linen(MLP, 5).apply(variables, x)

    apply = jax.jit(lambda model, v, x: traces.append(1) or model.apply(v, x), static_argnums=0)
    x = inputs((4, 3))
    variables = bridge.to_linen(MLP, 5).init(KEY, x)
    for _ in range(3):
        run(variables, x)
    assert len(traces) == 1
    traces.clear()
    for _ in range(3):
        apply(bridge.to_linen(MLP, 5), variables, x)
    assert len(traces) == 1


def test_a_wrapper_may_be_called_repeatedly_in_one_forward_pass():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = bridge.to_linen(Counting, name="layer")
            return layer(layer(x))

    model = Twice()
    variables = model.init(KEY, jnp.ones(()))
    assert int(variables["Count"]["layer"]["calls"]) == 0
    y, updates = model.apply(variables, jnp.ones(()), mutable=["Count"])
    assert float(y) == 4.0
    assert int(updates["Count"]["layer"]["calls"]) == 2


def test_users_may_subclass_the_wrapper():
    class Scaled(bridge.ToLinen):
        scale: float = 3.0

        @nn.compact
        def __call__(self, *args, **kwargs):
            return self.scale * super().__call__(*args, **kwargs)

    x = inputs((4, 3))
    model = Scaled(nnx.Linear, args=(3, 2))
    y, variables = model.init_with_output(KEY, x)
    native = nnx.Linear(3, 2, rngs=nnx.Rngs(KEY))
    assert_identical(y, 3.0 * native(x))
    assert_identical(model.apply(variables, x), 3.0 * native(x))


def test_a_subclass_may_have_variables_and_submodules_of_its_own():
    class Headed(bridge.ToLinen):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, (1, 1))
            return nn.Dense(2, name="head")(super().__call__(x)) * scale

    x = inputs((4, 3))
    model = Headed(nnx.Linear, args=(3, 3), strict=True)
    y, variables = model.init_with_output(KEY, x)
    assert set(variables["params"]) == {"kernel", "bias", "scale", "head"}
    assert_identical(model.apply(variables, x), y)


class Around(nnx.Module):
    """Holds a Linen module that its constructor is given, in whatever it is given."""

    def __init__(self, given, *, rngs):
        self.inner = bridge.ToNNX(jax.tree.leaves(given)[0], rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: bridge.ToLinen(Around, args=(inner,)),
        lambda inner: bridge.ToLinen(Around, args=((inner, 2),)),
        lambda inner: bridge.ToLinen(Around, kwargs={"given": inner}),
        lambda inner: bridge.ToLinen(Around, kwargs={"given": [inner]}),
    ],
    ids=["positional", "in a tuple", "by keyword", "in a list"],
)
def test_a_linen_module_among_the_arguments_is_free_for_every_call(make):
    inner = nn.Dense(2)
    x = inputs((4, 3))
    model = make(inner)
    variables = model.init(KEY, x)
    expected = inner.apply({"params": variables["params"]["inner"]}, x)
    for _ in range(2):
        assert_identical(model.apply(variables, x), expected)
        assert_close(jax.jit(model.apply)(variables, x), expected)
    assert inner.scope is None
    assert inner.name is None


def test_a_module_in_a_field_of_a_subclass_is_a_submodule():
    class Before(bridge.ToLinen):
        first: Any = None

        @nn.compact
        def __call__(self, x):
            return super().__call__(self.first(x))

    first = nn.Dense(3)
    x = inputs((4, 5))
    model = Before(nnx.Linear, args=(3, 2), first=first)
    y, variables = model.init_with_output(KEY, x)
    params = variables["params"]
    assert set(params) == {"kernel", "bias", "first"}
    native = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    nnx.update(native, {"kernel": params["kernel"], "bias": params["bias"]})
    assert_identical(model.apply(variables, x), native(first.apply({"params": params["first"]}, x)))
    assert_identical(model.apply(variables, x), y)
    assert first.scope is None


def test_linen_knows_the_signature_of_a_call():
    def call(self, /, *args, nnx_method=None, **kwargs):
        raise NotImplementedError

    found = inspect.signature(bridge.ToLinen.__call__).parameters.values()
    expected = inspect.signature(call).parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [
        (p.name, p.kind, p.default) for p in expected
    ]


def test_what_linen_captures_of_a_call_may_be_passed_in_again():
    model = bridge.ToLinen(MLP, args=(5,), strict=True)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    y, captured = model.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    assert_identical(captured["intermediates"]["__call__"], (y,))
    assert_identical(model.apply({**variables, **captured}, x), y)


def test_automatic_names_are_those_of_the_class():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = bridge.to_linen(nnx.Linear, 3, 3)(x)
            x = bridge.to_linen_class(nnx.Linear)(in_features=3, out_features=3)(x)
            return bridge.to_linen(nnx.Linear, 3, 3)(x)

    variables = Two().init(KEY, jnp.ones((1, 3)))
    assert set(variables["params"]) == {"ToLinen_0", "LinearToLinen_0", "ToLinen_1"}
    assert set(variables["nnx"]) == {"ToLinen_0", "LinearToLinen_0", "ToLinen_1"}


def test_a_constructor_argument_called_name_can_be_passed():
    class Named(nnx.Module):
        def __init__(self, name, *, rngs):
            self.label = name
            self.w = nnx.Param(jnp.ones(1))

        def __call__(self):
            return self.label

    model = bridge.ToLinen(Named, kwargs={"name": "Ada"}, name="outer")
    assert model.name == "outer"
    assert model.init_with_output(KEY)[0] == "Ada"


def test_a_constructor_without_rngs_is_detected():
    class Constant(nnx.Module):
        def __init__(self, value=2.0):
            self.constant = nnx.Variable(jnp.array(value))

        def __call__(self, x):
            return x + self.constant

    model = bridge.ToLinen(Constant)
    y, variables = model.init_with_output(KEY, jnp.array(1.0))
    assert float(y) == 3.0
    assert float(model.apply(variables, jnp.array(2.0))) == 4.0
    assert_identical(bridge.ToLinen(Constant, skip_rng=True).init(KEY, jnp.array(1.0)), variables)


def test_skip_rng_keeps_rngs_from_a_constructor_that_takes_them():
    class Optional(nnx.Module):
        def __init__(self, rngs=None):
            self.given = rngs is not None
            self.w = nnx.Param(jnp.ones(1))

        def __call__(self):
            return self.given

    assert bridge.ToLinen(Optional).init_with_output(KEY)[0] is True
    assert bridge.ToLinen(Optional, skip_rng=True).init_with_output(KEY)[0] is False


def test_a_train_state_trains_it_as_optax_trains_the_native_module():
    x, target = inputs((8, 3)), inputs((8, 2))
    model = bridge.to_linen(MLP, 5)
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=model.init(KEY, x), tx=optax.sgd(0.1)
    )

    @jax.jit
    def step(state):
        grads = jax.grad(lambda v: jnp.mean((state.apply_fn(v, x) - target) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    native = MLP(5, rngs=nnx.Rngs(KEY))
    optimizer = nnx.Optimizer(native, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def native_step(native, optimizer):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - target) ** 2))(native)
        optimizer.update(native, grads)

    for _ in range(3):
        state = step(state)
        native_step(native, optimizer)
    trained = linen_values(state.params)
    for path, value in nnx_values(native).items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_native_module():
    x = inputs((4, 3))
    model = bridge.to_linen(MLP, 5)
    grads = jax.grad(lambda v: model.apply(v, x).sum())(model.init(KEY, x))
    native = nnx.grad(lambda m: m(x).sum())(MLP(5, rngs=nnx.Rngs(KEY)))
    expected = {p: v.get_value() for p, v in nnx.to_flat_state(native)}
    assert linen_values(grads).keys() == expected.keys()
    for path, value in linen_values(grads).items():
        assert_identical(value, expected[path])
    assert grads["nnx"]["graphdef"] is not None


@pytest.mark.parametrize("case", ["BatchNorm", "nnx.List", "Dropout"], indirect=True)
def test_apply_under_jit_equals_the_native_call_under_jit(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    variables = model.init(KEY, x)
    y, _ = jax.jit(lambda v, x: model.apply(v, x, mutable=["batch_stats", "RngCount"]))(
        variables, x
    )
    native = nnx.jit(lambda m, x: m(x))(cls(*args, rngs=nnx.Rngs(KEY)), x)
    assert_close(y, native)


def test_apply_under_vmap_maps_the_native_call():
    x = inputs((6, 4, 3))
    model = bridge.to_linen(MLP, 5)
    variables = model.init(KEY, x[0])
    y = jax.vmap(model.apply, in_axes=(None, 0))(variables, x)
    native = MLP(5, rngs=nnx.Rngs(KEY))
    expected = jnp.stack([native(row) for row in x])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_an_ensemble_is_initialised_and_applied_under_vmap():
    x = inputs((4, 3))
    model = bridge.to_linen(MLP, 5)
    keys = jax.random.split(KEY, 3)
    variables = jax.vmap(model.init, in_axes=(0, None))(keys, x)
    y = jax.vmap(model.apply, in_axes=(0, None))(variables, x)
    expected = jnp.stack([MLP(5, rngs=nnx.Rngs(key))(x) for key in keys])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_graphdef", [True, False])
def test_a_second_thread_computes_the_same(with_graphdef):
    x = inputs((4, 3))
    model = bridge.to_linen(MLP, 5)
    variables = model.init(KEY, x)
    expected = model.apply(variables, x)
    if not with_graphdef:
        del variables["nnx"]
    found, errors = [], []

    def work():
        try:
            found.append((model.init(KEY, x)["params"], model.apply(variables, x)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for params, y in found:
        assert_identical(params, variables["params"])
        assert_identical(y, expected)


@contextlib.contextmanager
def frozen_dicts():
    flax.config.update("flax_return_frozendict", True)
    try:
        yield
    finally:
        flax.config.update("flax_return_frozendict", False)


def test_frozen_variables_work(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    expected = model.init_with_output(KEY, x)
    mutable = ["batch_stats", "RngCount"]
    y, updates = model.apply(expected[1], x, mutable=mutable)
    with frozen_dicts():
        output, variables = model.init_with_output(KEY, x)
        assert isinstance(variables, flax.core.FrozenDict)
        assert_identical(output, expected[0])
        assert_identical(variables.unfreeze(), expected[1])
        frozen_y, frozen_updates = model.apply(variables, x, mutable=mutable)
        assert_identical(frozen_y, y)
        assert_identical(flax.core.unfreeze(frozen_updates), flax.core.unfreeze(updates))
        without = flax.core.FrozenDict({c: v for c, v in variables.items() if c != "nnx"})
        assert_identical(model.apply(without, x, mutable=mutable)[0], y)


def test_tree_mode_computes_what_graph_mode_computes(case):
    cls, args, x = case
    model = bridge.to_linen(cls, *args)
    mutable = ["batch_stats", "RngCount"]
    expected = model.init_with_output(KEY, x)
    applied = model.apply(expected[1], x, mutable=mutable)
    with nnx.set_graph_mode(False):
        output, variables = model.init_with_output(KEY, x)
        assert_identical(output, expected[0])
        assert_identical(variables, expected[1])
        assert_identical(model.apply(variables, x, mutable=mutable), applied)
        without = {c: v for c, v in variables.items() if c != "nnx"}
        assert_identical(model.apply(without, x, mutable=mutable)[0], applied[0])


def a_function(rngs):
    return MLP(5, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: MLP(5, rngs=nnx.Rngs(0)), "ToLinen.from_module"),
        (lambda: a_function, "pass the class"),
        (lambda: nn.Dense, "ToNNX"),
        (lambda: nn.Dense(3), "ToNNX"),
        (lambda: 3, "subclass of flax.nnx.Module"),
        (lambda: int, "subclass of flax.nnx.Module"),
    ],
    ids=["an instance", "a function", "a Linen class", "a Linen instance", "a number", "a class"],
)
@pytest.mark.parametrize("wrap", [bridge.ToLinen, bridge.to_linen, bridge.to_linen_class])
def test_what_cannot_be_wrapped_is_refused_with_a_remedy(make, remedy, wrap):
    found = make()
    with pytest.raises(bridge.InvalidModuleError, match=remedy) as caught:
        wrap(found)
    assert caught.value.found is found
    assert isinstance(caught.value, TypeError)


def test_a_call_that_raises_changes_nothing_in_the_variables():
    class Failing(nnx.Module):
        def __init__(self, *, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.offset = jnp.zeros(3)

        def __call__(self, x, *, fail=False):
            y = self.dropout(self.norm(x))
            self.offset = self.offset + 1
            self.created = nnx.Cache(y)
            if fail:
                raise RuntimeError("on purpose")
            return y

    model = bridge.to_linen(Failing)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    before = jax.tree.map(lambda a: a, variables)
    leaves = jax.tree.leaves(variables)
    copies = [np.array(numbers(leaf)) for leaf in leaves]
    with pytest.raises(RuntimeError, match="on purpose"):
        model.apply(variables, x, fail=True, mutable=True)
    with pytest.raises(bridge.InvalidMethodError):
        model.apply(variables, x, nnx_method="nope", mutable=True)
    with pytest.raises(TypeError):
        model.apply(variables, jnp.ones((4, 9)), mutable=True)
    assert jax.tree.structure(variables) == jax.tree.structure(before)
    assert all(a is b for a, b in zip(jax.tree.leaves(variables), leaves, strict=True))
    for leaf, copy in zip(leaves, copies, strict=True):
        np.testing.assert_array_equal(numbers(leaf), copy)


def test_a_successful_call_changes_nothing_in_the_caller_s_variables():
    model = bridge.to_linen(NnxNormed)
    x = inputs((4, 3))
    variables = model.init(KEY, x)
    on_host = jax.tree.map(np.asarray, {k: v for k, v in variables.items() if k != "nnx"})
    kept = jax.tree.map(np.copy, on_host)
    model.apply(on_host, x, mutable=True)
    model.apply(variables, x, mutable=True)
    assert_identical(on_host, kept)
    assert_identical(variables["batch_stats"], kept["batch_stats"])


def test_linen_sees_no_method_of_the_wrapper_but_those_of_the_model():
    class Shift(nnx.Module):
        def __init__(self):
            self.shift = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return x + self.shift

    module = bridge.ToLinen(Shift)
    x = jnp.ones((2,))
    variables = module.init(jax.random.key(0), x)
    everything = module.apply(variables, x, capture_intermediates=lambda module, name: True)[1]
    assert set(everything["intermediates"]) == {"__call__"}


@pytest.mark.parametrize(
    ("found", "hint"),
    [
        (nnx.Linear, r"to_linen\(Linear"),
        (nn.Dense(3), "Linen already"),
        (nn.Dense, "Linen already"),
        (nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), "nnx.merge"),
        ({"params": {}}, "instance of a subclass"),
    ],
    ids=["class", "Linen module", "Linen class", "State", "variables"],
)
def test_from_module_takes_an_nnx_module_that_exists_and_nothing_else(found, hint):
    with pytest.raises(bridge.InvalidModuleError, match=hint) as raised:
        bridge.ToLinen.from_module(found)
    assert raised.value.found is found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"args": 8, "kwargs": 3}, "args as a tuple.* and kwargs as a dict.*found .8, 3."),
        ({"args": 8}, "args as a tuple of positional arguments, found 8"),
        ({"args": "ab"}, "args as a tuple of positional arguments, found 'ab'"),
        ({"args": None}, "args as a tuple of positional arguments, found None"),
        ({"args": {"in_features": 8}}, "args as a tuple"),
        ({"args": (8, 3), "kwargs": None}, "kwargs as a dict by name, found None"),
        ({"args": (8, 3), "kwargs": [1]}, "kwargs as a dict by name"),
        ({"args": (8, 3), "kwargs": {1: 2}}, "kwargs as a dict by name"),
    ],
    ids=str,
)
def test_constructor_arguments_in_a_wrong_form_are_one_error(fields, expected):
    with pytest.raises(bridge.InvalidModuleError, match=expected) as raised:
        bridge.ToLinen(nnx.Linear, **fields)
    assert "to_linen(Linear, …)" in str(raised.value)
    with pytest.raises(TypeError, match="args=\\(…\\)"):
        bridge.ToLinen(nnx.Linear, 8, 3)


def test_constructor_arguments_may_be_any_sequence_and_any_mapping():
    expected = bridge.to_linen(nnx.Linear, 8, 3).init(KEY, jnp.ones((1, 8)))["params"]
    for args, kwargs in (
        ([8], {"out_features": 3}),
        ((8, 3), FrozenDict({})),
        (range(8, 9), {"out_features": 3}),
    ):
        model = bridge.ToLinen(nnx.Linear, args=args, kwargs=kwargs)
        params = model.init(KEY, jnp.ones((1, 8)))["params"]
        np.testing.assert_array_equal(params["kernel"], expected["kernel"])
