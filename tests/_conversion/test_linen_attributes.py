"""The Linen variables that a ToNNX holds, whatever a call makes of their values."""

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._conversion import linen_attributes
from bridge._conversion.linen_leaves import from_variables
from tests.drawing import drawing
from tests.models import assert_identical
from tests.strategies import exact

ONE, TWO = jnp.ones(2), jnp.full(3, 2.0)


class Writer(nn.Module):
    """Puts the values that it is given in the place of its variables, some in a submodule."""

    depth: int = 1

    @nn.compact
    def __call__(self, values):
        for (collection, name), value in values.items():
            self.variable(collection, name, lambda: None).value = value
        if self.depth:
            Writer(self.depth - 1)(values)
        return jnp.zeros(())


arrays = st.sampled_from([ONE, TWO])
leaves = st.one_of(
    st.none(),
    arrays,
    st.tuples(arrays, arrays),
    arrays.map(lambda x: nn.Partitioned(x, ("data",))),
    arrays.map(lambda x: nn.LogicallyPartitioned(x, ("embed",))),
    arrays.map(lambda x: bridge.NNXMeta(nnx.Cache, x, {"tag": "t"})),
)
values = st.recursive(
    leaves, lambda below: st.dictionaries(st.sampled_from("ab"), below, max_size=2), max_leaves=3
)
# Two collections, so that leaves of one lie above those of another.
steps = st.lists(
    st.dictionaries(st.tuples(st.sampled_from(["state", "cache"]), st.sampled_from("ab")), values),
    min_size=1,
    max_size=5,
)


def of_cache(values):
    """Values for Linen: an `NNXMeta` says which collection it belongs to."""
    return {
        (collection, name): value
        for (collection, name), value in values.items()
        if collection == "cache" or "NNXMeta" not in str(value)
    }


def in_linen(variables, values):
    _, updates = Writer().apply(variables, values, mutable=True)
    return {**variables, **updates}


@drawing(100)
@given(steps)
def test_a_variable_may_become_anything_that_it_may_in_linen(steps):
    steps = list(map(of_cache, steps))
    expected = Writer().init({}, steps[0])
    model = bridge.lazy_init(bridge.ToNNX(Writer(), mutable=True), steps[0])
    assert exact(model.linen_variables()) == exact(expected)
    for values in steps[1:]:
        expected = in_linen(expected, values)
        model(values)
        assert exact(model.linen_variables()) == exact(expected)


SEQUENCE = (
    None,
    {"a": ONE},
    ONE,
    {"a": {"b": ONE, "c": TWO}},
    {"a": ONE},
    {},
    TWO,
    (ONE, TWO),
    None,
)


@pytest.mark.parametrize(
    "jit", [lambda f: f, nnx.jit, "jit_partial"], ids=["eager", "jit", "bound"]
)
def test_the_new_form_reaches_the_model_through_compiled_calls(jit):
    model = bridge.lazy_init(bridge.ToNNX(Writer(), mutable=True), {("state", "s"): None})
    variables = Writer().init({}, {("state", "s"): None})
    for value in SEQUENCE:
        step = lambda m, value=value: m({("state", "s"): value})  # noqa: E731
        if jit == "jit_partial":
            bridge.jit_partial(step, model)()
        else:
            jit(step)(model)
        variables = in_linen(variables, {("state", "s"): value})
        assert exact(model.linen_variables()) == exact(variables)


def test_a_frozen_dict_may_take_the_place_of_a_value():
    model = bridge.lazy_init(bridge.ToNNX(Writer(), mutable=True), {("state", "s"): ONE})
    model({("state", "s"): freeze({"a": {"b": ONE}})})
    assert_identical(nn.unbox(model.s["a"]["b"][...]), ONE)
    model({("state", "s"): TWO})
    assert_identical(model.s[...], TWO)


def test_an_unchanged_variable_is_kept_when_others_change_their_form():
    model = bridge.lazy_init(
        bridge.ToNNX(Writer(0), mutable=True), {("state", "s"): {"a": ONE}, ("state", "t"): ONE}
    )
    kept = model.t
    model({("state", "s"): ONE})
    assert model.t is kept


def test_a_repeated_initialisation_keeps_the_form_that_a_variable_has():
    model = bridge.lazy_init(bridge.ToNNX(Writer()), {("state", "s"): ONE})
    bridge.lazy_init(model, {("state", "s"): {"a": TWO}, ("state", "t"): TWO})
    assert_identical(
        model.linen_variables(),
        {"state": {"s": ONE, "t": TWO, "Writer_0": {"s": ONE, "t": TWO}}},
    )


def test_a_change_of_form_in_a_call_that_raises_leaves_the_model_as_it_was():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, value):
            self.variable("state", "s", lambda: ONE).value = value
            self.variable("state", "to_nnx__x" if isinstance(value, dict) else "t", lambda: ONE)

    model = bridge.lazy_init(bridge.ToNNX(Failing(), mutable=True), ONE)
    before, s = exact(model.linen_variables()), model.s
    with pytest.raises(bridge.ReservedNameError, match="to_nnx__x"):
        model({"a": TWO})
    assert exact(model.linen_variables()) == before
    assert model.s is s


VARIABLES = {"params": {"a": {"w": ONE, "b": TWO}, "c": ONE}, "cache": {"a": {"w": TWO}, "d": {}}}


def test_what_a_wrapper_takes_in_is_what_it_has():
    model = bridge.ToNNX.from_variables(nn.Dense(2), VARIABLES)
    assert exact(model.linen_variables()) == exact(VARIABLES)


def test_two_variables_for_one_linen_variable_are_an_error_for_any_reader():
    class Adds(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.variable("cache", "w", lambda: ONE).value

    # The one of `cache` is below its collection's name, as `params` has the place.
    model = bridge.ToNNX.from_variables(Adds(), {"params": {"w": TWO}, "cache": {"w": ONE}})
    assert_identical(model(ONE), ONE + ONE)
    model.w = nnx.Cache(5 * ONE)
    for read in (model.linen_variables, lambda: model(ONE)):
        with pytest.raises(bridge.ConversionError, match="cache/w"):
            read()


def test_attributes_are_not_set_on_a_module_of_another_trace():
    model = bridge.ToNNX(nn.Dense(2))
    leaves = from_variables(VARIABLES)
    with pytest.raises(flax.errors.TraceContextError):
        jax.eval_shape(lambda: linen_attributes.store(model, leaves, {}))
    assert not linen_attributes.held_variables(model)


def test_a_subclass_that_sets_attributes_in_its_own_way_is_asked_for_each():
    asked = []

    class Noting(bridge.ToNNX):
        def __setattr__(self, name, value):
            asked.append(name)
            super().__setattr__(name, value)

    Noting.from_variables(nn.Dense(2), VARIABLES)
    assert {"a", "c", "d"} <= set(asked)


def test_a_property_of_a_subclass_is_not_hidden_by_a_linen_name():
    class Fixed(bridge.ToNNX):
        @property
        def c(self):
            return 3

    with pytest.raises(bridge.ReservedNameError, match="'c': Fixed has a property"):
        Fixed.from_variables(nn.Dense(2), VARIABLES)
