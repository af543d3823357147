"""Functions that `setup` keeps call the module at hand in every copy, as in Linen."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

import bridge
from tests.drawing import drawing

X = np.array([[1.0, 2.0, 3.0]], np.float32)
INIT = nn.initializers.normal()


class Plain:
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x) * 2


@dataclasses.dataclass(frozen=True)
class Dataclass:
    function: Any

    def __call__(self, x):
        return self.function(x) * 3


class Tuple(NamedTuple):
    function: Any
    power: int = 2

    def __call__(self, x):
        return self.function(x) ** self.power


def plus(number, function, x):
    return function(x) + number


KINDS = {
    "method": lambda m: m.body,
    "method of a submodule": lambda m: m.own.__call__,
    "method of a layer of Flax": lambda m: m.dense.__call__,
    "submodule": lambda m: m.own,
    "partial": lambda m: functools.partial(plus, 1, m.body),
    "lambda": lambda m: lambda x: m.body(x) * jnp.asarray(m.w),
    "lambda over a submodule": lambda m: (lambda own: lambda x: own(x) + 2)(m.own),
    "lambda over a parameter": lambda m: (lambda w: lambda x: jnp.asarray(w) * x)(m.w),
    "nothing of the module": lambda m: functools.partial(plus, 1, jnp.sin),
}
AROUND = [Plain, Dataclass, Tuple, lambda f: functools.partial(plus, 3, f), lambda f: f]
CONTAINERS = {
    "none": (lambda f: f, lambda value: value),
    "list": (lambda f: [f, 3], lambda value: value[0]),
    "dict": (lambda f: {"a": f, "b": "c"}, lambda value: value["a"]),
    "named tuple": (Tuple, lambda value: value.function),
    "nested": (lambda f: {"a": [3, (f,)]}, lambda value: value["a"][1][0]),
}
COPIES = {
    "itself": lambda model: model,
    "nnx.clone": nnx.clone,
    "nnx.merge": lambda model: nnx.merge(*nnx.split(model)),
    "a copy of a copy": lambda model: nnx.clone(nnx.clone(model)),
}


def model(b, kept):
    class Own(b.Module):
        @b.compact
        def __call__(self, x):
            return jnp.sin(x * jnp.asarray(self.param("s", INIT, (1, 3))))

    class Inner(b.Module):
        def setup(self):
            self.dense, self.own = nn.Dense(3), Own()
            self.w = self.param("w", INIT, (1, 3))
            for i, (kind, around, container) in enumerate(kept):
                value = CONTAINERS[container][0](around(KINDS[kind](self)))
                setattr(self, f"kept_{i}", value)

        def body(self, x):
            return self.dense(x) * jnp.asarray(self.w)

        def __call__(self, x):
            for i, (_, _, container) in enumerate(kept):
                x = CONTAINERS[container][1](getattr(self, f"kept_{i}"))(x)
            return self.own(self.dense(x))

    class Model(b.Module):
        def setup(self):
            self.scale = self.param("scale", INIT, (1, 3))
            self.inner = [Inner()]

        def scaled(self, x):
            return x * jnp.asarray(self.scale)

        def __call__(self, x):
            return self.scaled(self.inner[0](x))

    return Model()


def flat(tree):
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(tree).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6)


@drawing(4)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*KINDS]), st.sampled_from(AROUND), st.sampled_from([*CONTAINERS])
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([*COPIES]),
    st.booleans(),
)
def test_a_copy_calls_itself(kept, copy, is_compiled):
    linen, style = model(nn, kept), model(bridge, kept)
    variables = linen.init(jax.random.key(0), X)
    copied = COPIES[copy](style.bind(variables))
    # The copy has other weights than the module that `setup` ran in.
    other = jax.tree.map(lambda leaf: leaf * 1.5 + 0.1, variables)
    nnx.update(copied, nnx.state(style.bind(other)))

    def loss(call, params):
        return (call(params) ** 2).sum()

    def wrap(function):
        return nnx.jit(function) if is_compiled else function

    expected = jax.grad(lambda v: loss(lambda v: linen.apply(v, X), v))(other)["params"]
    found = wrap(nnx.grad(lambda model: loss(lambda model: model(X), model)))(copied)
    assert_same(flat(nnx.to_pure_dict(found)), flat(expected))
    assert np.allclose(copied(X), linen.apply(other, X), rtol=1e-5)
    assert_same(flat(copied.variables.unfreeze()), flat(other))


def counting(b):
    class Counter:
        def __init__(self, layer):
            self.layer, self.calls = layer, 0

        def __call__(self, x):
            self.calls += 1
            return self.layer(x)

    class Model(b.Module):
        def setup(self):
            self.dense = nn.Dense(3)
            self.first = Counter(self.dense)
            self.second = {"first": self.first}

        def __call__(self, x):
            return self.second["first"](self.first(x)) * self.first.calls

    return Model()


def test_an_object_is_one_in_a_call_and_new_in_the_next():
    variables = counting(nn).init(jax.random.key(0), X)
    y = counting(nn).apply(variables, X)
    kept = counting(bridge).bind(variables)
    for each in (kept, kept, nnx.clone(kept)):
        assert np.array_equal(each(X), y)
    assert np.array_equal(counting(bridge).apply(variables, X), y)


MADE_ANEW = {
    "jit": lambda m: jax.jit(m.dense),
    "cache": lambda m: functools.lru_cache(m.dense),
    "generator": lambda m: (f for f in [m.dense]),
}
LAYER = "a layer of Flax"


def keeping(b, make):
    class Model(b.Module):
        def setup(self):
            self.dense = nn.Dense(3)
            self.kept = make(self)

        def body(self, x):
            return self.dense(x)

        def __call__(self, x):
            return self.body(x) * (self.kept is not None)

    return Model()


@pytest.mark.parametrize("make", MADE_ANEW.values(), ids=MADE_ANEW)
def test_what_cannot_be_copied_is_made_anew(make):
    variables = keeping(nn, make).init(jax.random.key(0), X)
    y = keeping(nn, make).apply(variables, X)
    assert np.array_equal(keeping(bridge, make).apply(variables, X), y)
    kept = nnx.clone(keeping(bridge, make).bind(variables))
    for _ in range(2):
        assert np.array_equal(kept(X), y)
    assert kept.kept is not kept.kept


def calling(b):
    class Calling(b.Module):
        value: Any
        inner: Any = None

        @b.compact
        def __call__(self, x):
            x = x if self.inner is None else self.inner(x)
            return self.value(x) if callable(self.value) else x * self.value

    return Calling


REFUSED = {
    "a layer of Flax": lambda b, m: nn.Sequential([nn.Dense(3), m.body]),
    "a method": lambda b, m: calling(b)(m.body),
    "a method in a partial in a list": lambda b, m: [
        calling(b)(functools.partial(plus, 1, m.body))
    ],
    "a function of a submodule": lambda b, m: calling(b)(lambda x, own=m.dense: own(x)),
    "a method, further in": lambda b, m: calling(b)(1, calling(b)(1, calling(b)(m.body))),
    "an array": lambda b, m: calling(b)(jnp.asarray(m.w) * 2),
    "an array, further in": lambda b, m: {"a": calling(b)(1, calling(b)(jnp.ones((1, 3))))},
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_submodule_that_stays_has_nothing_of_one_call_in_its_fields(make):
    def model(b):
        class Model(b.Module):
            def setup(self):
                self.dense, self.w = nn.Dense(3), self.param("w", INIT, (1, 3))
                self.kept = make(b, self)

            def body(self, x):
                return self.dense(x)

            def __call__(self, x):
                (kept,) = jax.tree.leaves(self.kept, is_leaf=callable)
                return kept(self.body(x))

        return Model

    # A call that keeps no module is as Linen's.
    variables = model(nn)().init(jax.random.key(0), X)
    y = model(nn)().apply(variables, X)
    assert np.array_equal(model(bridge)().apply(variables, X), y)
    for call in (
        lambda: model(bridge)().bind(variables),
        lambda: bridge.lazy_init(model(bridge)(rngs=0), X),
    ):
        with pytest.raises(bridge.InvalidModuleError, match=r"Model\.kept.* a compact method"):
            call()


def test_a_submodule_of_a_compact_method_has_what_belongs_to_the_call():
    def make(b):
        class Model(b.Module):
            @b.compact
            def __call__(self, x):
                w = jnp.asarray(self.param("w", INIT, (1, 3)))
                return calling(b)(w * 2)(calling(b)(self.body)(x))

            def body(self, x):
                return x + 1

        return Model()

    variables = make(nn).init(jax.random.key(0), X)
    other = jax.tree.map(lambda leaf: leaf * 1.5 + 0.1, variables)
    copied = nnx.clone(make(bridge).bind(variables))
    for each in (variables, other):
        nnx.update(copied, nnx.state(make(bridge).bind(each)))
        assert np.array_equal(copied(X), make(nn).apply(each, X))


def with_locals(b):
    class Own(b.Module):
        @b.compact
        def __call__(self, x):
            return jnp.sin(x * jnp.asarray(self.param("s", INIT, (1, 3))))

    class Model(b.Module):
        def setup(self):
            first, second, third = Own(), Own(name="second"), Own()
            self.first, self.other, self.rest = first, second, [third]
            self.run = lambda x: first(x) * 2 + third(second(x))

        def __call__(self, x):
            return self.rest[0](self.run(x)) + self.other(x)

    return Model()


@pytest.mark.parametrize("copy", COPIES)
def test_a_function_calls_submodules_by_the_names_of_setup(copy):
    variables = with_locals(nn).init(jax.random.key(0), X)
    other = jax.tree.map(lambda leaf: leaf * 1.5 + 0.1, variables)
    copied = COPIES[copy](with_locals(bridge).bind(variables))
    nnx.update(copied, nnx.state(with_locals(bridge).bind(other)))
    for _ in range(2):
        assert np.allclose(copied(X), with_locals(nn).apply(other, X), rtol=1e-5)
    found = nnx.to_pure_dict(nnx.grad(lambda model: model(X).sum())(copied))
    expected = jax.grad(lambda v: with_locals(nn).apply(v, X).sum())(other)["params"]
    assert_same(flat(found), flat(expected))
    assert_same(flat(copied.variables.unfreeze()), flat(other))


def test_an_error_of_setup_is_its_own_where_an_attribute_is_read():
    functions = {"sin": jnp.sin}

    class Model(bridge.Module):
        def setup(self):
            self.dense = nn.Dense(3)
            self.run = functools.partial(functions["sin"], self.dense)

    kept = Model().bind({})
    functions.clear()
    with pytest.raises(KeyError, match="sin"):
        _ = kept.run
