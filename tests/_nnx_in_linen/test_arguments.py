"""A ToLinen keeps a constructor's arguments as they were given."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import bridge

KEY = jax.random.key(0)

ARGUMENTS = {
    "a list": [1, 2, [3]],
    "a dict": {"a": [1], "b": {"c": 2}},
    "a set": {1, 2},
    "an empty list": [],
    "a NumPy array": np.arange(3.0),
    "a jax array": jnp.arange(3.0),
    "a key": jax.random.key(3),
    "a list of arrays": [np.ones(2), jnp.zeros(2)],
    "a tuple of a list": (1, [2]),
    "a frozen dict": FrozenDict({"a": 1}),
    "a string": "text",
    "a function": jnp.tanh,
    "None": None,
    "a frozenset": frozenset({1}),
    "an initializer": nnx.initializers.ones,
}


class Keeping(nnx.Module):
    """Notes what its constructor was given."""

    given: list = []  # noqa: RUF012

    def __init__(self, argument, *, keyword, rngs):
        self.given.append((argument, keyword))
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self):
        return self.w[...]


def same(a, b):
    if isinstance(a, np.ndarray | jax.Array):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


@pytest.fixture(params=ARGUMENTS.values(), ids=ARGUMENTS)
def argument(request):
    return request.param


def test_an_argument_reaches_the_constructor_as_given(argument):
    Keeping.given.clear()
    bridge.ToLinen(Keeping, args=(argument,), kwargs={"keyword": argument}).init(KEY)
    ((first, second),) = Keeping.given
    assert same(first, argument)
    assert same(second, argument)


def test_a_wrapper_with_any_argument_is_hashable_and_equal_by_value(argument):
    """Regression: dict and list arguments were unhashable."""

    def make(extra):
        return bridge.ToLinen(Keeping, args=(argument,), kwargs={"keyword": extra})

    assert make(argument) == make(argument)
    assert hash(make(argument)) == hash(make(argument))
    assert make(argument) != make("something else")


def test_a_wrapper_with_any_argument_is_applied_without_the_definition(argument):
    model = bridge.ToLinen(Keeping, args=(argument,), kwargs={"keyword": argument})
    variables = model.init(KEY)
    del variables["nnx"]
    assert float(model.apply(variables)) == 1.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1, 2], [2, 1]),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
        ({1}, {2}),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, int)),
        (np.zeros(4), np.zeros((2, 2))),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
        ([1], [True]),
        ([1], [1.0]),
    ],
)
def test_different_arguments_make_different_wrappers(a, b):
    assert bridge.to_linen(Keeping, a, keyword=0) != bridge.to_linen(Keeping, b, keyword=0)


def test_a_dict_s_order_does_not_make_a_difference():
    a = bridge.to_linen(Keeping, {"a": 1, "b": 2}, keyword=0)
    b = bridge.to_linen(Keeping, {"b": 2, "a": 1}, keyword=0)
    assert a == b
    assert hash(a) == hash(b)


def test_a_constructor_that_writes_into_its_argument_spares_the_wrapper():
    class Writing(nnx.Module):
        def __init__(self, sizes, *, rngs):
            self.w = nnx.Param(jnp.ones(sizes.pop()))

        def __call__(self):
            return self.w.shape

    model = bridge.to_linen(Writing, [1, 2])
    before = hash(model)
    variables = model.init(KEY)
    assert model.init_with_output(KEY)[0] == (2,)
    del variables["nnx"]
    assert model.apply(variables) == (2,)
    assert hash(model) == before


def test_a_caller_who_writes_into_an_argument_does_not_change_the_wrapper():
    class Sized(nnx.Module):
        def __init__(self, sizes, *, rngs):
            self.w = nnx.Param(jnp.ones(sizes[0]))

        def __call__(self):
            return self.w.shape

    sizes = [2]
    model = bridge.to_linen(Sized, sizes)
    sizes[0] = 5
    assert model.init_with_output(KEY)[0] == (2,)
    assert model == bridge.to_linen(Sized, [2])


def test_nested_containers_are_copied_for_the_constructor_too():
    class Writing(nnx.Module):
        def __init__(self, config, *, rngs):
            config["sizes"].append(1)
            self.count = len(config["sizes"])

        def __call__(self):
            return self.count

    model = bridge.ToLinen(Writing, args=({"sizes": []},))
    assert [model.init_with_output(KEY)[0] for _ in range(3)] == [1, 1, 1]
    inside_a_tuple = bridge.ToLinen(functools.partial(Writing), args=({"sizes": ([],)[0]},))
    assert inside_a_tuple.init_with_output(KEY)[0] == 1


def test_submodule_classes_and_instances_are_arguments_like_others():
    class Outer(nnx.Module):
        def __init__(self, make, width, *, rngs):
            self.inner = make(3, width, rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    model = bridge.to_linen(Outer, nnx.Linear, 2)
    y, _ = model.init_with_output(KEY, jnp.ones((1, 3)))
    np.testing.assert_array_equal(y, nnx.Linear(3, 2, rngs=nnx.Rngs(KEY))(jnp.ones((1, 3))))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": x}])
def test_a_traced_array_may_be_an_argument(wrap):
    class Shifted(nnx.Module):
        def __init__(self, shift, *, rngs):
            self.shift = nnx.Variable(jax.tree.leaves(shift)[0])

        def __call__(self, x):
            return x + self.shift

    @jax.jit
    def run(shift):
        model = bridge.ToLinen(Shifted, args=(wrap(shift),))
        y, variables = model.init_with_output(KEY, jnp.ones(2))
        return y, model.apply(variables, jnp.ones(2))

    for y in run(jnp.full(2, 3.0)):
        np.testing.assert_array_equal(y, [4.0, 4.0])


def test_arguments_read_as_they_were_given(argument):
    model = bridge.ToLinen(Keeping, args=(argument,), kwargs={"keyword": argument})
    model = model.clone()
    assert same(model.args[0], argument)
    assert same(model.kwargs["keyword"], argument)


def test_the_repr_shows_what_was_given():
    assert "[1, 2]" in repr(bridge.to_linen(Keeping, [1, 2], keyword=0))


def test_rngs_given_as_an_argument_are_used():
    model = bridge.ToLinen(nnx.Linear, args=(3, 2), kwargs={"rngs": nnx.Rngs(5)})
    variables = model.init(KEY, jnp.ones((1, 3)))
    expected = nnx.Linear(3, 2, rngs=nnx.Rngs(5)).kernel[...]
    np.testing.assert_array_equal(variables["params"]["kernel"], expected)


def test_a_traced_argument_does_not_outlive_its_trace():
    class Holding(nnx.Module):
        def __init__(self, value, *, rngs):
            self.value = nnx.Variable(value)

        def __call__(self):
            return self.value[...]

    variables = bridge.to_linen(Holding, jnp.ones(2)).init(KEY)
    del variables["nnx"]
    with jax.checking_leaks():
        y = jax.jit(lambda value: bridge.to_linen(Holding, value).apply(variables))(jnp.ones(2))
    np.testing.assert_array_equal(y, [1.0, 1.0])


class Scale(nnx.Module):
    """Keeps an argument as it is."""

    def __init__(self, by):
        self.by = by
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.w[...] * self.by

    def double(self, x):
        self.by = self.by * 2
        return x * self.by


class Config:
    def __init__(self, by):
        self.by = {"scale": [by]}


class Configured(Scale):
    def __init__(self, config):
        super().__init__(config.by["scale"][0])


class Called(Scale):
    def __init__(self, make):
        super().__init__(make())


class Scaling(nn.Module):
    """Makes a wrapper in a call, with what the call was given."""

    make: Any

    @nn.compact
    def __call__(self, x, by):
        return self.make(by)(x)


WAYS = {
    "positional": lambda by: bridge.to_linen(Scale, by),
    "keyword": lambda by: bridge.to_linen(Scale, by=by),
    "strict": lambda by: bridge.ToLinen(Scale, args=(by,), strict=True),
    "partial": lambda by: bridge.to_linen(functools.partial(Scale, by)),
    "configuration": lambda by: bridge.to_linen(Configured, Config(by)),
    "closure": lambda by: bridge.to_linen(Called, lambda: by),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [jnp.array, np.array, float])
def test_each_call_uses_its_own_array_argument(way, kind):
    """Regression: an array froze at the value that it had at `init`, and had no gradient."""
    model = Scaling(WAYS[way])
    variables = model.init(KEY, jnp.array(3.0), kind(2.0))
    assert set(variables) == {"params", "nnx"}
    for by in (2.0, 5.0):
        np.testing.assert_array_equal(model.apply(variables, 3.0, kind(by)), 3.0 * by)
        np.testing.assert_array_equal(jax.jit(model.apply)(variables, 3.0, kind(by)), 3.0 * by)
    gradient = jax.grad(lambda by: model.apply(variables, 3.0, by))
    np.testing.assert_array_equal(gradient(jnp.array(2.0)), 3.0)
    mapped = jax.vmap(lambda by: model.apply(variables, 3.0, by))
    np.testing.assert_array_equal(mapped(jnp.arange(3.0)), [0.0, 3.0, 6.0])


@pytest.mark.parametrize("with_graphdef", [True, False])
def test_an_array_argument_that_a_call_replaced_is_state_from_then_on(with_graphdef):
    model = bridge.to_linen(Scale, jnp.array(2.0))
    variables = model.init(KEY, 3.0)
    if not with_graphdef:
        del variables["nnx"]
    native = Scale(jnp.array(2.0))
    for _ in range(2):
        y, updates = model.apply(variables, 3.0, nnx_method="double", mutable=["nnx_arrays"])
        np.testing.assert_array_equal(y, native.double(3.0))
        variables = {**variables, **updates}
        np.testing.assert_array_equal(model.apply(variables, 3.0), native(3.0))


def test_an_array_argument_is_given_to_a_definition_out_of_a_pickle():
    model = bridge.to_linen(Scale, jnp.array(2.0))
    variables = model.init(KEY, 3.0)
    variables["nnx"] = pickle.loads(pickle.dumps(variables["nnx"]))
    np.testing.assert_array_equal(model.apply(variables, 3.0), 6.0)


def test_an_array_argument_stays_one_in_a_changed_definition():
    class Counting(Scale):
        def __call__(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().__call__(x)

    model = Scaling(lambda by: bridge.to_linen(Counting, by))
    by = jnp.array(2.0)
    variables = model.init(KEY, 3.0, by)
    _, updates = model.apply(variables, 3.0, by, mutable=["nnx"])
    assert set(updates) == {"nnx"}
    y, updates = model.apply({**variables, **updates}, 3.0, jnp.array(5.0), mutable=["nnx"])
    np.testing.assert_array_equal(y, 15.0)
