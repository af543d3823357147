"""`init` of a ToLinen makes everything, without what a call needs from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

import bridge
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.arange(8.0).reshape(4, 2)


class Normed(nnx.Module):
    def __init__(self, axis_name=None, *, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        y = self.norm(self.linear(x))
        if not hasattr(self, "seen"):
            self.seen = nnx.Cache(y.max())
        return y


class Both(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(2, axis_name=("a", "b"), rngs=rngs)
        self.axis_name = "c"

    def __call__(self, x):
        return self.norm(x) + jax.lax.axis_index(self.axis_name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_batch_norm_over_an_axis_is_initialised_without_it(compiled):
    run = jax.jit if compiled else lambda function: function
    expected, variables = run(bridge.to_linen(Normed).init_with_output)(KEY, X)
    y, made = run(bridge.to_linen(Normed, axis_name="batch").init_with_output)(KEY, X)
    for collection in ("params", "batch_stats"):
        assert_identical(made[collection], variables[collection])
    # The mean over an axis of size 1 is the value.
    assert jnp.allclose(y, expected)
    assert jnp.allclose(made["cache"]["seen"], expected.max())
    assert y.shape == expected.shape


def test_several_axes_are_missing():
    model = bridge.to_linen(Both)
    y, variables = model.init_with_output(KEY, X)
    assert y.shape == X.shape
    assert_identical(variables["batch_stats"]["norm"]["mean"], jnp.zeros(2))


def test_what_was_initialised_without_the_axis_runs_over_it():
    model = bridge.to_linen(Normed, axis_name="batch")
    variables = model.init(KEY, X)
    native = Normed("batch", rngs=nnx.Rngs(KEY))
    xs = jnp.stack([X, 2 * X])

    def call(x):
        return model.apply(variables, x, mutable=["batch_stats", "cache"])

    y, updates = jax.vmap(call, axis_name="batch")(xs)
    states = nnx.StateAxes({nnx.BatchStat: None, nnx.Cache: 0, ...: None})
    native.seen = nnx.Cache(jnp.zeros(2))
    expected = nnx.vmap(lambda m, x: m(x), in_axes=(states, 0), axis_name="batch")(native, xs)
    assert jnp.allclose(y, expected)
    assert jnp.allclose(updates["batch_stats"]["norm"]["mean"][0], native.norm.mean[...])


def test_another_name_error_is_the_users():
    class Typo(nnx.Module):
        def __call__(self, x):
            return undefined_name  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        bridge.to_linen(Typo).init(KEY, X)


def test_the_definition_is_the_first_collection():
    assert next(iter(bridge.to_linen(Normed).init(KEY, X))) == "nnx"


def test_a_call_that_creates_the_variables_keeps_what_it_changes():
    native = Normed(rngs=nnx.Rngs(KEY))
    expected = native(X)
    model = bridge.to_linen(Normed)
    y, variables = model.apply({}, X, rngs={"params": KEY}, mutable=True)
    assert jnp.allclose(y, expected)
    assert_identical(variables["batch_stats"]["norm"]["mean"], native.norm.mean[...])


def test_a_second_method_of_a_shared_module_creates_its_own_variables():
    class Two(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.total = nnx.Cache(jnp.zeros(()))

        def first(self, x):
            self.calls += 1
            self.total[...] += 1
            return x

        def second(self, x):
            self.other = nnx.Cache(x.sum())
            self.total = nnx.Cache(self.total[...] + 1)
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            two = bridge.ToLinen(Two, name="two")
            return two(two(x, nnx_method="first"), nnx_method="second")

    variables = Model().init(KEY, X)
    expected = {"total": jnp.zeros(()), "other": X.sum()}
    assert_identical(variables["cache"]["two"], expected)


class Constructed(nnx.Module):
    """All of its variables are there once it is constructed."""

    def __init__(self):
        rngs = nnx.Rngs(3)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)])
        self.count = nnx.Cache(jnp.zeros(()))

    def __call__(self, x, *, scale=1):
        self.count[...] += 1
        return self.layers[1](self.layers[0](x)) * scale

    def without_inputs(self):
        return self.count[...] + 1


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_init_without_inputs_gives_the_state_as_constructed(run):
    model = bridge.ToLinen(Constructed)
    variables = run(model.init)(KEY)
    # Constructed by the same kind of program: a compiled one may round initial values otherwise.
    native = nnx.merge(*run(lambda: nnx.split(Constructed()))())
    assert_identical(variables["params"]["layers"][0]["kernel"], native.layers[0].kernel[...])
    assert_identical(variables["batch_stats"]["layers"][1]["var"], native.layers[1].var[...])
    assert_identical(variables["cache"], {"count": native.count[...]})
    y, updates = model.apply(variables, X, mutable=["cache", "batch_stats"])
    assert_identical(y, native(X))
    assert_identical(updates["batch_stats"]["layers"][1]["mean"], native.layers[1].mean[...])


def test_init_without_inputs_computes_nothing_of_a_call():
    model = bridge.ToLinen(Constructed)
    made = jax.make_jaxpr(lambda key: model.init(key)["cache"])(KEY)
    assert not any(eqn.primitive.name == "dot_general" for eqn in made.jaxpr.eqns)
    assert model.init_with_output(KEY)[0] is None


def test_a_method_without_arguments_is_called_by_init():
    y, variables = bridge.ToLinen(Constructed).init_with_output(KEY, nnx_method="without_inputs")
    assert float(y) == 1
    assert float(variables["cache"]["count"]) == 0


class Mixed(nnx.Module):
    def __init__(self, sample=None, *, rngs):
        self.native = nnx.Linear(2, 2, rngs=rngs)
        self.inner = nnx.List([bridge.ToNNX(nn.Dense(2), rngs=rngs)])
        if sample is not None:
            bridge.lazy_init(self, sample)

    def __call__(self, x):
        return self.inner[0](self.native(x))


def test_init_without_inputs_names_the_modules_that_need_them():
    with pytest.raises(bridge.MissingInputsError, match=r"inner/0: ToNNX\(Dense\)") as error:
        bridge.to_linen(Mixed).init(KEY)
    assert error.value.modules == (("inner/0", "Dense"),)
    variables = bridge.to_linen(Mixed, X).init(KEY)
    assert variables["params"]["inner"][0]["kernel"].shape == (2, 2)


def test_a_linen_parent_that_forgets_an_argument_gets_the_method_s_error():
    class Forgetful(nn.Module):
        @nn.compact
        def __call__(self):
            return bridge.to_linen(nnx.Linear, 2, 3)()

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Forgetful().init(KEY)


class Plain(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        return self.linear(x)

    def count(self, x):
        self.calls += 1
        return x


def test_without_a_stored_graphdef_the_variables_are_arrays_alone():
    model = bridge.ToLinen(Plain, store_graphdef=False)
    variables = model.init(KEY, X)
    assert set(variables) == {"params"}
    assert set(flatten_dict(variables)) == {
        ("params", "linear", "bias"),
        ("params", "linear", "kernel"),
    }
    assert jax.tree.structure(jax.eval_shape(model.init, KEY, X)) == jax.tree.structure(variables)
    native = Plain(rngs=nnx.Rngs(KEY))(X)
    np.testing.assert_array_equal(model.apply(variables, X), native)
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, X), jax.jit(lambda: native)())
    y, updates = model.apply(variables, X, mutable=True)
    assert "nnx" not in updates
    np.testing.assert_array_equal(y, native)


def test_without_a_stored_graphdef_a_change_of_it_is_reported():
    model = bridge.ToLinen(Plain, store_graphdef=False, strict=True)
    variables = model.init(KEY, X)
    with pytest.raises(bridge.LostUpdateError, match="store_graphdef=True"):
        model.apply(variables, X, nnx_method="count", mutable=True)


def test_without_a_stored_graphdef_modules_nest_and_exist():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.ToLinen(nnx.BatchNorm, (2,), store_graphdef=False)(nn.Dense(2)(x))

    variables = Outer().init(KEY, X)
    assert set(variables) == {"params", "batch_stats"}
    Outer().apply(variables, X, mutable=["batch_stats"])
    native = Plain(rngs=nnx.Rngs(KEY))
    linen, variables = bridge.ToLinen.from_module(native, store_graphdef=False)
    assert set(variables) == {"params"}
    np.testing.assert_array_equal(linen.apply(variables, X), native(X))


class HoldsLinen(nnx.Module):
    def __init__(self, layer, *, rngs):
        self.layer = layer
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) * self.layer.features


def test_a_linen_module_among_the_arguments_keeps_no_variables_alive():
    model = bridge.to_linen(HoldsLinen, nn.Dense(3))
    first, second = (model.init(jax.random.key(i), jnp.ones((1, 2))) for i in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    native = HoldsLinen(nn.Dense(3), rngs=nnx.Rngs(0))
    found = model.apply(first, jnp.ones((1, 2)))
    assert jnp.array_equal(found, native(jnp.ones((1, 2))))
