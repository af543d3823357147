"""Two `init`s of one module have one tree structure, whatever its class keeps in attributes."""

import copy
import dataclasses
import enum
import functools
import re
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from tests.drawing import drawing

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))


@dataclasses.dataclass
class Config:
    """Neither hashable nor frozen."""

    width: object = 3
    names: list = dataclasses.field(default_factory=lambda: ["a"])


class Plain:
    def __init__(self, value=None):
        self.value = value

    def double(self, x):
        return x * 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value=None):
        self.value = value


class Broken:
    """An object whose own `==` and `hash` fail."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


class Color(enum.Enum):
    RED = 1


def double(x):
    return x * 2


def closing(value):
    return lambda x: (x, value)


def local_class(value):
    class Local:
        held = value

        def method(self):
            return value

    return Local


def generating():
    yield 1


# What a constructor makes anew each time it runs.
ATOMS = [
    lambda: 3,
    lambda: 0.5,
    lambda: "a",
    lambda: None,
    lambda: nnx.relu,
    lambda: jnp.bfloat16,
    lambda: Color.RED,
    lambda: lambda x: x + 1,
    lambda: closing(2),
    lambda: double,
    lambda: functools.lru_cache(lambda x: x),
    lambda: functools.cache(double),
    lambda: jax.jit(lambda x: x * 2),
    lambda: nnx.jit(lambda x: x * 2),
    lambda: nnx.remat(lambda x: x * 2),
    lambda: jax.custom_jvp(lambda x: x),
    lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 10), mask=lambda p: p),
    lambda: optax.chain(optax.clip(1.0), optax.masked(optax.sgd(0.1), {"a": True})),
    lambda: nn.Dense(3),
    lambda: nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    lambda: Plain().double,
    Broken,
    object,
    threading.Lock,
    lambda: iter([1, 2]),
    generating,
    lambda: np.random.default_rng(0),
    lambda: re.compile("a"),
    lambda: jax.make_mesh((1,), ("a",), devices=jax.devices()[:1]),
    lambda: memoryview(b"a"),
]


def within(held):
    return st.one_of(
        held.map(lambda make: lambda: functools.partial(double, make())),
        held.map(lambda make: lambda: functools.partial(closing(make()))),
        held.map(lambda make: lambda: closing(make())),
        held.map(lambda make: lambda: Config(make())),
        held.map(lambda make: lambda: Plain(make())),
        held.map(lambda make: lambda: Slotted(make())),
        held.map(lambda make: lambda: types.SimpleNamespace(value=make())),
        held.map(lambda make: lambda: local_class(make())),
        held.map(lambda make: lambda: [local_class(make())()]),
        held.map(lambda make: lambda: Plain([make(), {"a": make()}, (make(),)])),
        held.map(lambda make: lambda: {"a": make(), "b": [make()]}),
        held.map(lambda make: lambda: (make(), make())),
    )


attributes = st.recursive(
    st.sampled_from(ATOMS)
    | st.sampled_from([lambda: Plain(np.arange(3.0)), lambda: closing(np.float32(2))]),
    within,
    max_leaves=4,
)


def made(makers, *, submodule):
    """A class that keeps these in its attributes."""

    class Keeping(nnx.Module):
        def __init__(self, *, rngs):
            class Inner(nnx.Module):
                def __init__(self):
                    self.kept = nnx.static(makers[0]())

            self.linear = nnx.Linear(3, 3, rngs=rngs)
            if submodule:
                self.inner = Inner()
            for i, make in enumerate(makers):
                setattr(self, f"kept{i}", nnx.static(make()))

        def __call__(self, x):
            return self.linear(x)

    return Keeping


def add(a, b):
    return jax.tree.map(jnp.add, a, b)


def assert_equal_for_every_tree_function(model, a, b):
    structure = jax.tree.structure(a)
    assert structure == jax.tree.structure(b)
    assert hash(structure) == hash(jax.tree.structure(b))
    jax.tree.map(lambda x, y: None, a, b)
    jax.tree.all(jax.tree.map(lambda x, y: True, a, b))
    jax.tree_util.tree_map_with_path(lambda p, x, y: None, a, b)
    jax.tree.transpose(structure, jax.tree.structure([0]), jax.tree.map(lambda x: [x], b))
    jax.tree.unflatten(structure, jax.tree.leaves(b))
    assert jax.tree_util.tree_structure(a).flatten_up_to(b)
    jax.lax.cond(True, lambda: a, lambda: b)
    jax.lax.switch(1, [lambda: a, lambda: b])
    jax.lax.scan(lambda carry, _: (b, None), a, length=2)
    jax.lax.while_loop(lambda v: False, lambda v: b, a)
    jax.lax.fori_loop(0, 2, lambda i, v: b, a)
    traces = []

    @jax.jit
    def run(variables):
        traces.append(1)
        return model.apply(variables, X)

    np.testing.assert_array_equal(run(a), run(b))
    run(add(a, b))
    assert len(traces) == 1
    optimizer = optax.adam(0.1)
    jax.tree.map(lambda x, y: None, optimizer.init(a), optimizer.init(b))


# JAX 0.12 warns when a native module keeps an iterator, as some of these do.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@drawing(30, deadline=None)
@given(st.lists(attributes, min_size=1, max_size=3), st.booleans())
def test_two_inits_have_one_structure_whatever_the_class_keeps(makers, submodule):
    model = bridge.to_linen(made(makers, submodule=submodule))
    a = model.init(KEY, X)
    for b in (
        model.init(KEY, X),
        jax.jit(model.init)(KEY, X),
        jax.tree.map(lambda v: v + 0, a),
        copy.deepcopy(a),
    ):
        assert_equal_for_every_tree_function(model, a, b)
    assert jax.tree.structure(jax.eval_shape(model.init, KEY, X)) == jax.tree.structure(a)


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@drawing(20, deadline=None)
@given(attributes)
def test_a_sharded_init_has_the_structure_of_an_abstract_one(make):
    model = bridge.to_linen(made([make], submodule=True))
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    a = bridge.abstract(model, mesh, X, rngs=KEY)
    b = bridge.init_sharded(model, mesh, X, rngs=KEY)
    jax.tree.map(lambda x, y: None, a, b)
    jax.tree.map(lambda x, y: None, b, model.init(KEY, X))
    shardings = jax.tree.map(lambda x: x.sharding, a)
    jax.jit(model.init, out_shardings=shardings)(KEY, X)


@pytest.mark.parametrize("make", [lambda i: i, closing, lambda i: Plain([i])])
def test_definitions_that_hold_different_numbers_differ(make):
    class Rolled(nnx.Module):
        def __init__(self, *, rngs):
            self.kept = make(int(jax.random.randint(rngs.params(), (), 0, 1000)))

        def __call__(self, x):
            return x

    a, b = (bridge.to_linen(Rolled).init(jax.random.key(i), X) for i in (0, 1))
    assert jax.tree.structure(a) != jax.tree.structure(b)


def test_an_array_that_a_constructor_draws_keeps_definitions_apart():
    class Drawn(nnx.Module):
        def __init__(self, *, rngs):
            self.kept = Plain(jax.random.normal(rngs.params(), (4, 3)))

        def __call__(self, x):
            return x * self.kept.value

    model = bridge.to_linen(Drawn)
    run = jax.jit(model.apply)
    for seed in (0, 1):
        key = jax.random.key(seed)
        want = Drawn(rngs=nnx.Rngs(key))(X)
        np.testing.assert_array_equal(run(model.init(key, X), X), want)


def test_what_a_call_has_changed_is_equal_to_nothing_else():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.compiled = jax.jit(lambda x: x)

        def __call__(self, x):
            self.calls += 1
            return x * self.calls

    model = bridge.to_linen(Counting)
    before = model.init(KEY, X)
    _, after = model.apply(before, X, mutable=["nnx"])
    assert jax.tree.structure(after) != jax.tree.structure(before)


def test_a_program_is_compiled_again_for_what_an_argument_held_later():
    class Scaled(nnx.Module):
        def __init__(self, config):
            self.config = config

        def __call__(self, x):
            return x * self.config.value

    config = Plain(2.0)
    model = bridge.ToLinen(Scaled, args=(config,))
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(model.init(KEY, X), X), X * 2)
    config.value = 3.0
    np.testing.assert_array_equal(run(model.init(KEY, X), X), X * 3)
