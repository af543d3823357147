"""`ToLinen`: methods, attributes, `bind`, and modules that exist."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))


class Autoencoder(nnx.Module):
    def __init__(self, width, *, rngs):
        self.encoder = nnx.Linear(3, width, rngs=rngs)
        self.decoder = nnx.Linear(width, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.width = width
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x, *, scale=1.0):
        self.calls[...] += 1
        return self.encoder(x) * scale

    def decode(self, z):
        return self.decoder(z)

    @staticmethod
    def double(x):
        return 2 * x


class Nested(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = Autoencoder(2, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.fixture
def model():
    return bridge.to_linen(Autoencoder, 2)


@pytest.fixture
def variables(model):
    return model.init(KEY, X)


@pytest.fixture
def native():
    return Autoencoder(2, rngs=nnx.Rngs(KEY))


def by_function(module, x):
    return module.encode(x)


CALLS = {
    "nnx_method by name": {"nnx_method": "encode"},
    "nnx_method by function": {"nnx_method": Autoencoder.encode},
    "nnx_method by another function": {"nnx_method": by_function},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_nnx_method_chooses_the_method(options, model, variables, native):
    y, updates = model.apply(variables, X, mutable=["batch_stats"], **options)
    np.testing.assert_array_equal(y, native.encode(X))
    assert int(updates["batch_stats"]["calls"]) == 1


def test_linen_s_method_chooses_the_method_by_name(model, variables, native):
    """Regression: `method='encode'` failed."""
    y, updates = model.apply(variables, X, method="encode", mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native.encode(X))
    assert int(updates["batch_stats"]["calls"]) == 1


def test_linen_s_method_takes_a_method_of_the_wrapper(model, variables, native):
    z, _ = model.apply(variables, X, method=model.encode, mutable=["batch_stats"])
    np.testing.assert_array_equal(z, native.encode(X))
    np.testing.assert_array_equal(model.apply(variables, z, method=model.decode), native.decode(z))


def test_linen_s_method_takes_a_function_of_the_wrapper(model, variables, native):
    def run(wrapper, x):
        return wrapper.decode(wrapper.encode(x))

    y, updates = model.apply(variables, X, method=run, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native(X))
    assert int(updates["batch_stats"]["calls"]) == 1


def test_keyword_arguments_reach_the_method(model, variables, native):
    y, _ = model.apply(variables, X, nnx_method="encode", scale=3.0, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native.encode(X, scale=3.0))
    y, _ = model.apply(variables, X, method="encode", scale=3.0, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native.encode(X, scale=3.0))


@pytest.mark.parametrize("choose", [{"nnx_method": "encode"}, {"method": "encode"}])
def test_init_through_a_method_gives_the_variables_of_the_whole_module(choose, variables, model):
    found = model.init(KEY, X, **choose)
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    assert_identical(found, variables)


def test_methods_are_called_in_a_linen_parent(native):
    class Parent(nn.Module):
        def setup(self):
            self.model = bridge.to_linen(Autoencoder, 2)

        def __call__(self, x):
            return self.model.decode(self.model.encode(x))

    variables = Parent().init(KEY, X)
    y, updates = Parent().apply(variables, X, mutable=["batch_stats"])
    inner = {c: v["model"] for c, v in variables.items()}
    expected, _ = bridge.to_linen(Autoencoder, 2).apply(inner, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected)
    assert int(updates["batch_stats"]["model"]["calls"]) == 1


@pytest.mark.parametrize("method", ["no_such", "width"])
def test_a_bad_method_of_linen_s_own_argument_is_python_s_error(method, model, variables):
    with pytest.raises(AttributeError, match=method):
        model.apply(variables, X, method=method)


@pytest.mark.parametrize("method", ["no_such", "width", 3])
def test_the_error_of_a_bad_nnx_method_names_the_methods_there_are(method, model, variables):
    with pytest.raises(bridge.InvalidMethodError, match="'decode', 'double', 'encode'") as caught:
        model.apply(variables, X, nnx_method=method)
    assert caught.value.method == method
    assert "Autoencoder" in str(caught.value)


def test_a_module_that_cannot_be_called_is_told_by_the_methods_that_it_has():
    class Encoder(nnx.Module):
        def encode(self, x):
            return x

    with pytest.raises(bridge.InvalidMethodError, match=r"'__call__'.*methods are 'encode'"):
        bridge.to_linen(Encoder).init(KEY, X)


def test_a_bad_method_at_init_is_the_same_error(model):
    with pytest.raises(bridge.InvalidMethodError):
        model.init(KEY, X, nnx_method="no_such")


def test_constructor_keywords_are_attributes():
    model = bridge.to_linen(nnx.Linear, 3, out_features=2, kernel_init=nnx.initializers.ones)
    assert model.out_features == 2
    assert model.kernel_init is nnx.initializers.ones
    held = bridge.ToLinen(nnx.Linear, kwargs={"in_features": 3, "sizes": [1, {"a": 2}]})
    assert held.sizes == [1, {"a": 2}]


@pytest.mark.parametrize("name", ["no_such", "encoder", "width"])
def test_an_unbound_wrapper_has_no_attributes_of_the_module(name, model):
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=name):
        getattr(model, name)


def test_the_attributes_of_the_module_are_those_of_the_bound_wrapper(model, variables, native):
    bound = model.bind(variables)
    assert bound.width == 2
    np.testing.assert_array_equal(bound.encoder.kernel[...], native.encoder.kernel[...])
    np.testing.assert_array_equal(bound.encoder(X), native.encoder(X))
    assert not hasattr(bound, "no_such")


def test_a_bound_wrapper_is_called_as_the_module_is(model, variables, native):
    bound = model.bind(variables, mutable=["batch_stats"])
    np.testing.assert_array_equal(bound(X), native(X))
    np.testing.assert_array_equal(bound.encode(X), native.encode(X))
    np.testing.assert_array_equal(bound.decode(bound.encode(X)), native.decode(native.encode(X)))
    assert int(bound.variables["batch_stats"]["calls"]) == 3


def test_a_static_method_is_called_without_the_module(model, variables, native):
    np.testing.assert_array_equal(model.bind(variables).double(X), native.double(X))
    np.testing.assert_array_equal(model.apply(variables, X, nnx_method="double"), native.double(X))


def test_a_submodule_s_call_keeps_its_updates():
    model = bridge.to_linen(Nested)
    variables = model.init(KEY, X)
    native = Nested(rngs=nnx.Rngs(KEY))
    bound = model.bind(variables, mutable=["batch_stats"])
    np.testing.assert_array_equal(bound.inner(X), native.inner(X))
    np.testing.assert_array_equal(bound.inner.encode(X), native.inner.encode(X))
    np.testing.assert_array_equal(bound.inner.encoder(X), native.inner.encoder(X))
    assert bound.inner.width == 2
    assert int(bound.variables["batch_stats"]["inner"]["calls"]) == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda bound: bound.calls.set_value(jnp.array(100)),
        lambda bound: bound.calls.__setitem__(..., 100),
        lambda bound: bound.encoder.kernel.__setitem__(0, 1.0),
        lambda bound: bound.layers[0].kernel.__setitem__(..., 1.0),
        lambda bound: setattr(bound.encoder, "kernel", nnx.Param(jnp.ones((3, 2)))),
        lambda bound: setattr(bound.encoder, "out_features", 5),
    ],
)
@pytest.mark.parametrize("mutable", [True, False])
def test_a_write_into_what_a_bound_wrapper_answers_is_refused(write, mutable, model, variables):
    bound = model.bind(variables, mutable=mutable)
    with pytest.raises(bridge.LostUpdateError, match=r"was read from a bound ToLinen.*nnx_method="):
        write(bound)
    jax.tree.map(np.testing.assert_array_equal, dict(bound.variables), variables)


def test_a_write_in_a_call_of_a_bound_wrapper_reaches_the_variables(model, variables, native):
    def double(module):
        module.encoder.kernel[...] *= 2

    bound = model.bind(variables, mutable=True)
    bound(nnx_method=double)
    double(native)
    np.testing.assert_array_equal(bound(X), native(X))
    np.testing.assert_array_equal(bound.encoder.kernel[...], native.encoder.kernel[...])


def test_a_variable_with_hooks_is_read_as_before_from_a_bound_wrapper():
    class Hooked(nnx.Module):
        def __init__(self, *, rngs):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hooks = {"on_get_value": lambda v, x: 2 * x, "on_set_value": lambda v, x: x / 2}
                self.w = nnx.Param(jnp.ones(3), **hooks)

        def __call__(self, x):
            return x @ self.w[...]

    model = bridge.to_linen(Hooked)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.bind(variables).w[...], Hooked(rngs=nnx.Rngs(KEY)).w[...])


def test_attributes_that_are_none_or_false_are_there():
    class Flagged(nnx.Module):
        def __init__(self, *, rngs):
            self.flag = False
            self.nothing = None

        def __call__(self):
            return 1

    bound = bridge.to_linen(Flagged).bind(bridge.to_linen(Flagged).init(KEY))
    assert bound.flag is False
    assert bound.nothing is None


def test_submodules_in_a_list_are_called_too(model, variables, native):
    bound = model.bind(variables)
    np.testing.assert_array_equal(bound.layers[0](X), native.layers[0](X))


def test_attributes_answer_without_the_definition(model, variables, native):
    bound = model.bind({c: v for c, v in variables.items() if c != "nnx"})
    assert bound.width == 2
    np.testing.assert_array_equal(bound.encoder(X), native.encoder(X))


def test_the_wrapper_s_own_names_win():
    class Colliding(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self):
            return 1

        def apply(self):
            return 2

        def init(self):
            return 3

    model = bridge.to_linen(Colliding)
    variables = model.init(KEY)
    assert model.apply(variables) == 1
    assert model.apply(variables, nnx_method="apply") == 2
    assert model.apply(variables, nnx_method="init") == 3


def test_a_module_that_exists_becomes_a_linen_module_and_its_variables(native):
    expected = Autoencoder(2, rngs=nnx.Rngs(KEY))
    model, variables = bridge.ToLinen.from_module(native)
    y, updates = model.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected(X))
    assert int(updates["batch_stats"]["calls"]) == 1
    assert int(native.calls[...]) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(KEY)),
        lambda: nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)]),
        lambda: nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.relu),
        lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
    ],
)
def test_the_variables_of_a_module_that_exists_are_its_state(make):
    module = make()
    _, variables = bridge.ToLinen.from_module(module)
    assert set(variables) - {"nnx"} == {
        {nnx.Param: "params", nnx.BatchStat: "batch_stats"}[type(v)]
        for _, v in nnx.to_flat_state(nnx.state(module))
    }
    found = len(jax.tree.leaves(variables))
    assert found == len(jax.tree.leaves(nnx.state(module)))


def test_an_existing_module_needs_no_definition_in_the_variables(native):
    expected = Autoencoder(2, rngs=nnx.Rngs(KEY))(X)
    model, variables = bridge.ToLinen.from_module(native)
    del variables["nnx"]
    np.testing.assert_array_equal(model.apply(variables, X, mutable=["batch_stats"])[0], expected)


def test_a_sequence_of_modules_that_exists_can_be_applied():
    module = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.relu)
    model, variables = bridge.ToLinen.from_module(module)
    np.testing.assert_array_equal(model.apply(variables, X), module(X))


def test_a_module_that_exists_is_not_initialised(native):
    model, _ = bridge.ToLinen.from_module(native)
    with pytest.raises(bridge.InvalidModuleError, match="from_module"):
        model.init(KEY, X)


def test_options_reach_the_wrapper_of_a_module_that_exists(native):
    model, _ = bridge.ToLinen.from_module(native, strict=True, name="kept")
    assert model.strict is True
    assert model.name == "kept"
    assert isinstance(model, bridge.ToLinen)
    assert model == bridge.ToLinen.from_module(native, strict=True, name="kept")[0]
    assert hash(model) == hash(bridge.ToLinen.from_module(native, strict=True, name="kept")[0])


def test_string_keys_reach_the_variables_of_a_module_that_exists(native):
    _, variables = bridge.ToLinen.from_module(native, string_keys=True)
    assert list(variables["params"]["layers"]) == ["0"]


def test_the_methods_of_a_module_that_exists_are_the_wrapper_s(native):
    model, variables = bridge.ToLinen.from_module(native)
    z, _ = model.apply(variables, X, method="encode", mutable=["batch_stats"])
    np.testing.assert_array_equal(z, native.encode(X))


def test_an_existing_module_can_be_a_submodule_with_variables_in_place(native):
    expected = Autoencoder(2, rngs=nnx.Rngs(KEY))(X)
    inner, variables = bridge.ToLinen.from_module(native)

    class Parent(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    nested = {collection: {"inner": tree} for collection, tree in variables.items()}
    y, _ = Parent(inner).apply(nested, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected)


def test_a_partial_or_class_method_constructs_as_the_class_does():
    class Configured(nnx.Module):
        def __init__(self, width, *, rngs):
            self.linear = nnx.Linear(3, width, rngs=rngs)

        @classmethod
        def from_config(cls, config, *, rngs):
            return cls(config["width"], rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    native = Configured(2, rngs=nnx.Rngs(KEY))
    for model in (
        bridge.ToLinen(functools.partial(Configured, 2)),
        bridge.ToLinen(functools.partial(Configured, width=2)),
        bridge.ToLinen(Configured.from_config, args=({"width": 2},)),
    ):
        variables = model.init(KEY, X)
        np.testing.assert_array_equal(model.apply(variables, X), native(X))
        del variables["nnx"]
        np.testing.assert_array_equal(model.apply(variables, X), native(X))


def test_a_method_called_func_hides_no_other():
    """Regression: the wrapper took it for the class behind a partial."""

    class Model(nnx.Module):
        def func(self, x):
            return x + 1

        def encode(self, x):
            return 2 * self.func(x)

    model = bridge.to_linen(Model)
    assert model.apply({}, 3, method="encode") == 8
    assert model.apply({}, 3, method="func") == 4


def test_methods_of_a_partial_are_the_class_s(native):
    model = bridge.ToLinen(functools.partial(Autoencoder, 2))
    variables = model.init(KEY, X)
    y, _ = model.apply(variables, X, method="encode", mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native.encode(X))


def test_a_property_that_needs_no_variables_is_read_while_unbound():
    class Sized(nnx.Module):
        kind = "sized"

        def __init__(self, width, *, rngs):
            self.width = width
            self.linear = nnx.Linear(width, width, rngs=rngs)

        @property
        def doubled(self):
            return 2 * self.width

        @property
        def kernel(self):
            return self.linear.kernel

        @property
        def mean(self):
            return float(self.linear.kernel[...].mean())

    module = bridge.to_linen(Sized, 3)
    assert (module.doubled, module.kind) == (6, "sized")
    for name in ("kernel", "mean", "missing"):
        assert not hasattr(module, name)


def test_an_nnx_cell_runs_in_a_linen_rnn():
    xs = jnp.arange(24.0).reshape(2, 4, 3) / 24
    carry = jnp.zeros((2, 5))
    cell = bridge.to_linen(nnx.GRUCell, 3, 5)
    assert cell.num_feature_axes == nnx.GRUCell(3, 5, rngs=nnx.Rngs(0)).num_feature_axes
    model = nn.RNN(cell)
    variables = model.init(KEY, xs, initial_carry=carry)
    native = nnx.GRUCell(3, 5, rngs=nnx.Rngs(0))
    nnx.update(native, variables["params"]["cell"])
    expected = nnx.RNN(native)(xs, initial_carry=carry)
    np.testing.assert_allclose(model.apply(variables, xs, initial_carry=carry), expected, 1e-5)
