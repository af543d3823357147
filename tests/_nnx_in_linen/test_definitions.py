"""Variables without a GraphDef find their constructor, and nothing is kept too long."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import types
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._nnx_in_linen import creation
from tests.drawing import drawing
from tests.garbage_collection import earlier_objects_left_out

KEY = jax.random.key(0)
X = jnp.arange(6.0).reshape(2, 3)


class Act(nnx.Module):
    """Scales, and applies what its constructor was given."""

    def __init__(self, act, *, rngs):
        self.act = act
        self.scale = nnx.Param(jnp.full((1, 3), 2.0))

    def __call__(self, x):
        return self.act(x * self.scale[...])


class Configured(nnx.Module):
    """Reads a configuration in its constructor."""

    def __init__(self, config, *, rngs):
        self.factor = config.factor
        self.scale = nnx.Param(jnp.full((1, config.width), 2.0))

    def __call__(self, x):
        return x[:, :1] * self.scale[...] * self.factor


def params(model):
    return {"params": model.init(KEY, X)["params"]}


def native(cls, *args, **kwargs):
    """The output of the module as it is when it is constructed and called now."""
    return cls(*args, rngs=nnx.Rngs(KEY), **kwargs)(X)


@contextlib.contextmanager
def rebuilds():
    """Notes every time a constructor is traced for variables without a GraphDef."""
    noted = []
    real = creation._abstract

    def counted(recipe, *args):
        noted.append(recipe.nnx_class.__name__)
        return real(recipe, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(creation, "_abstract", counted)
        yield noted


def with_keyword_default(factor):
    def act(x, *, factor=factor):
        return x * factor

    return act


def with_default(factor):
    def act(x, factor=factor):
        return x * factor

    return act


def with_cell(factor):
    return lambda x: x * factor


def with_global(factor):
    namespace = {"__name__": "a_program", "FACTOR": factor}
    exec("def act(x):\n  return x * FACTOR", namespace)
    return namespace["act"]


def with_global_in_nested_code(factor):
    namespace = {"__name__": "a_program", "FACTOR": factor}
    exec("def act(x):\n  return [(lambda: x * FACTOR)() for _ in range(1)][0]", namespace)
    return namespace["act"]


def with_global_function(factor):
    namespace = {"__name__": "a_program", "FACTOR": factor}
    exec("def inner(x):\n  return x * FACTOR\ndef act(x):\n  return inner(x)", namespace)
    return namespace["act"]


def with_module(factor):
    module = types.ModuleType("settings_of_a_program")
    module.FACTOR = factor
    namespace = {"__name__": "a_program", "settings": module}
    exec("def act(x):\n  return x * settings.FACTOR", namespace)
    return namespace["act"]


def with_attribute(factor):
    def act(x):
        return x * act.factor

    act.factor = factor
    return act


def with_bound_method(factor):
    class Scaling:
        def __init__(self):
            self.factor = factor

        def act(self, x):
            return x * self.factor

    return Scaling().act


def with_callable(factor):
    class Scaling:
        def __call__(self, x):
            return x * factor

    return Scaling()


def with_partial(factor):
    return functools.partial(jnp.multiply, factor)


def with_array(factor):
    return functools.partial(jnp.multiply, jnp.array(factor))


def with_numpy_array(factor):
    return functools.partial(jnp.multiply, np.array(factor, np.float32))


MAKERS = (
    with_keyword_default,
    with_default,
    with_cell,
    with_global,
    with_global_in_nested_code,
    with_global_function,
    with_module,
    with_attribute,
    with_bound_method,
    with_callable,
    with_partial,
    with_array,
    with_numpy_array,
)


@pytest.mark.parametrize("make", MAKERS)
def test_functions_of_equal_code_with_other_closures_are_other_arguments(make):
    """Regression: the first one's function ran with the second one's variables."""
    acts = [make(factor) for factor in (2.0, 3.0, -0.0, 0.0)]
    for act in acts:
        model = bridge.to_linen(Act, act)
        found = model.apply(params(model), X)
        expected = native(Act, act)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("make", [with_keyword_default, with_default, with_cell])
def test_functions_that_hold_the_same_are_traced_once(make):
    with rebuilds() as noted:
        for _ in range(3):
            model = bridge.to_linen(Act, make(5.0))
            model.apply({"params": {"scale": jnp.ones((1, 3))}}, X)
    assert noted == ["Act"]


@dataclasses.dataclass
class Config:
    factor: float = 1.0
    width: int = 3


class ConfiguredInLinen(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config.width)(x) * self.config.factor


class HoldsConfiguredLinen(nnx.Module):
    def __init__(self, config, *, rngs):
        self.inner = bridge.ToNNX(ConfiguredInLinen(config), rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


def test_a_wrapped_linen_module_with_a_configuration_is_traced_once():
    """Regression: the constructor and the call were traced at each call."""
    variables = bridge.to_linen(HoldsConfiguredLinen, Config()).init(KEY, X)
    variables = {"params": variables["params"]}
    expected = ConfiguredInLinen(Config()).apply({"params": variables["params"]["inner"]}, X)
    with rebuilds() as noted:
        for _ in range(3):
            found = bridge.to_linen(HoldsConfiguredLinen, Config()).apply(variables, X)
            np.testing.assert_array_equal(found, expected)
        # With the configuration of the caller, and not with an earlier one.
        found = bridge.to_linen(HoldsConfiguredLinen, Config(2.0)).apply(variables, X)
        np.testing.assert_array_equal(found, expected * 2)
    # Without the call and with it, for either configuration.
    assert len(noted) == 4


class Slotted:
    __slots__ = ("factor", "width")


class Plain:
    pass


CONFIGS = {
    "dataclass": Config,
    "SimpleNamespace": types.SimpleNamespace,
    "argparse": argparse.Namespace,
    "slots": Slotted,
    "object": Plain,
    "nested": lambda: types.SimpleNamespace(inner=[{"config": Config()}]),
}


class Nested(Configured):
    def __init__(self, config, *, rngs):
        super().__init__(innermost(config), rngs=rngs)


def innermost(config):
    return config.inner[0]["config"] if isinstance(config, types.SimpleNamespace) else config


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("has_definition", [True, False])
def test_a_configuration_that_was_changed_is_another_one(kind, has_definition):
    """Regression: the module of the configuration as it once was ran."""
    config = CONFIGS[kind]()
    cls = Nested if kind == "nested" else Configured
    inside = innermost(config) if kind == "nested" else config
    inside.factor, inside.width = 1.0, 3
    model = bridge.to_linen(cls, config)
    variables = model.init(KEY, X)
    if not has_definition:
        del variables["nnx"]
    np.testing.assert_array_equal(model.apply(variables, X), native(cls, config))
    inside.factor = 7.0
    np.testing.assert_array_equal(model.apply(variables, X), native(cls, config))
    # Regression: a MismatchError said that the new width was wrong.
    inside.width = 5
    wider = {"params": {"scale": jnp.full((1, 5), 2.0)}}
    np.testing.assert_array_equal(model.apply(wider, X), native(cls, config))
    with pytest.raises(bridge.MismatchError):
        model.apply(variables, X)


def test_a_recursive_function_may_be_an_argument():
    """Regression: RecursionError."""

    def make(depth):
        def act(x, n=depth):
            return act(x * 2, n - 1) if n else x

        return act

    def mutual(depth):
        def even(x, n=depth):
            return odd(x * 2, n - 1) if n else x

        def odd(x, n):
            return even(x * 3, n - 1) if n else x

        return even

    for f in (make(2), make(3), mutual(2), mutual(3)):
        model = bridge.to_linen(Act, f)
        assert hash(model) == hash(bridge.to_linen(Act, f))
        np.testing.assert_array_equal(model.apply(params(model), X), native(Act, f))


def test_a_function_with_an_unset_cell_may_be_an_argument():
    """Regression: ValueError."""

    def make():
        later = 3

        def act(x):
            return x if x.ndim else later  # noqa: F821 - the cell is unset

        del later
        return act

    model = bridge.to_linen(Act, make())
    np.testing.assert_array_equal(model.apply(params(model), X), native(Act, make()))


def test_a_function_that_counts_its_calls_counts_its_own():
    """Two functions may hold the same now, and not after one of them was called."""

    def make():
        calls = 0

        def act(x):
            nonlocal calls
            calls += 1
            return x * calls

        return act

    first, second = make(), make()
    model = bridge.to_linen(Act, first)
    variables = params(model)
    expected = native(Act, second), native(Act, second)
    second = make()
    for stored in (variables, model.init(KEY, X)):
        fresh = make()
        other = bridge.to_linen(Act, fresh)
        for value in expected:
            np.testing.assert_array_equal(other.apply(stored, X), value)
    del second


def test_a_class_that_is_defined_again_is_another_one():
    def define(factor):
        class Model(nnx.Module):
            def __init__(self, *, rngs):
                self.factor = factor

            def __call__(self, x):
                return x * self.factor

        return Model

    for factor in (2.0, 3.0):
        cls = define(factor)
        np.testing.assert_array_equal(bridge.to_linen(cls).apply({}, X), native(cls))


class Tabled(nnx.Module):
    """Computes with a table that it got as it is."""

    def __init__(self, table, *, rngs):
        self.factor = float(np.asarray(innermost_array(table)).sum())

    def __call__(self, x):
        return x * self.factor


def innermost_array(value):
    return innermost_array(value.table) if hasattr(value, "table") else value


def test_an_array_written_into_is_another_one_where_the_module_sees_it():
    """The wrapper copies an array that it is given itself; one in an object it cannot."""
    table = np.ones(3)
    config = types.SimpleNamespace(table=types.SimpleNamespace(table=table))
    inside, copied = bridge.to_linen(Tabled, config), bridge.to_linen(Tabled, table)
    for total in (3.0, 12.0):
        table[0] = total - 2
        np.testing.assert_array_equal(inside.apply({}, X), X * total)
        np.testing.assert_array_equal(copied.apply({}, X), X * 3)


def test_a_setting_of_jax_makes_another_definition():
    class Zeros(nnx.Module):
        def __init__(self, *, rngs):
            self.made = str(jnp.zeros(3).dtype)

        def __call__(self, x):
            return self.made

    model = bridge.to_linen(Zeros)
    assert model.apply({}, X) == "float32"
    with jax.enable_x64(True):
        assert model.apply({}, X) == "float64"


@pytest.mark.parametrize("has_definition", [True, False])
def test_a_large_array_is_neither_copied_to_the_host_nor_hashed_in_a_call(has_definition):
    """Regression: 347 ms instead of 12, for 16 million elements in a partial."""
    table = jnp.ones((1 << 24,))

    def default(x, table=table):
        return x * table[None, :3]

    for act in (functools.partial(lambda table, x: x * table[None, :3], table), default):
        model = bridge.to_linen(Act, act)
        variables = model.init(KEY, X)
        if not has_definition:
            del variables["nnx"]
        expected = model.apply(variables, X)
        with without_copies_to_the_host(table), rebuilds() as noted:
            found = model.apply(variables, X)
        assert noted == []
        np.testing.assert_array_equal(found, expected)


@contextlib.contextmanager
def without_copies_to_the_host(array):
    """Raises if anything asks NumPy for the values of an array of JAX."""
    real = np.asarray

    def asarray(value, *args, **kwargs):
        assert not isinstance(value, jax.Array)
        return real(value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "asarray", asarray)
        patch.setattr(np, "array", asarray)
        patch.setattr(type(array), "tobytes", None, raising=False)
        patch.setattr(type(array), "__array__", None)
        with jax.transfer_guard_device_to_host("disallow"):
            yield


def test_nothing_in_a_graphdef_is_the_bytes_of_an_array():
    table = np.arange(1 << 12)
    model = bridge.to_linen(Tabled, table)
    graphdef = model.init(KEY, X)["nnx"]["graphdef"]
    assert not any(
        isinstance(part, bytes) and len(part) > 64 for part in graphdef.origin.constructor.key
    )
    assert table.tobytes() not in repr(graphdef.origin).encode()


class Owner:
    """Something that a weak reference can watch."""

    factor = 2.0
    width = 3


def closing_over(array, owner):
    def kernel_init(key, shape, dtype=jnp.float32):
        return jnp.broadcast_to(array[0], shape).astype(dtype)

    return bridge.to_linen(nnx.Linear, 3, 2, kernel_init=kernel_init), kernel_init


def configured(array, owner):
    owner.array = array
    return bridge.to_linen(Configured, owner), owner


def in_a_partial(array, owner):
    act = functools.partial(jnp.add, array[0])
    return bridge.to_linen(Act, act), act


def of_a_partial_class(array, owner):
    cls = functools.partial(Act, functools.partial(jnp.add, array[0]))
    return bridge.ToLinen(cls), cls


class Shifted(nnx.Module):
    def __init__(self, shift, *, rngs):
        self.shift = nnx.Param(shift)

    def __call__(self, x):
        return x + self.shift[0]


def given_an_array(array, owner):
    return bridge.to_linen(Shifted, array), array


class Mixed(nnx.Module):
    def __init__(self, init, *, rngs):
        self.dense = bridge.ToNNX(nn.Dense(2, kernel_init=init), rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def around_linen(array, owner):
    def init(key, shape, dtype=jnp.float32):
        return jnp.broadcast_to(array[0], shape).astype(dtype)

    return bridge.to_linen(Mixed, init), init


class Outer(nn.Module):
    make: Any

    @nn.compact
    def __call__(self, x):
        return self.make()(x)


def inside_linen(array, owner):
    make = functools.partial(lambda array: closing_over(array, None)[0], array)
    return Outer(make), make


def that_fails(array, owner):
    return bridge.to_linen(Act, lambda x: x + array[0], unknown=owner), owner


KINDS = (
    closing_over,
    configured,
    in_a_partial,
    of_a_partial_class,
    given_an_array,
    around_linen,
    inside_linen,
    that_fails,
)


def used_once(make):
    """Uses a model in every way, and returns what to watch."""
    array, owner = jnp.full(5, 3.0), Owner()
    model, made = make(array, owner)
    watched = [weakref.ref(array), weakref.ref(owner), weakref.ref(made)]
    refused = (TypeError,) if make is that_fails else ()
    with contextlib.suppress(*refused), warnings.catch_warnings():
        warnings.simplefilter("ignore", bridge.BridgeWarning)
        hash(model)
        variables = model.init(KEY, X)
        unknown = {**variables["params"], "unknown": X}
        for given in (variables, strip(variables), {"params": unknown}):
            model.apply(given, X)
            jax.eval_shape(model.apply, given, X)
    return watched


def strip(variables):
    """Without the definitions, at any depth."""
    return {
        name: strip(tree) if isinstance(tree, dict) else tree
        for name, tree in variables.items()
        if name != "nnx"
    }


def test_nothing_that_a_constructor_holds_outlives_its_models():
    """Regression: 30 models left 30 arrays, in the GraphDefs that a cache held on to."""
    for make in KINDS:
        used_once(make)
    # Once for all kinds: whatever comes next compiles again.
    jax.clear_caches()
    with earlier_objects_left_out():
        gc.collect()
        before = len(jax.live_arrays())
        watched = {make: [ref for _ in range(3) for ref in used_once(make)] for make in KINDS}
        jax.clear_caches()
        gc.collect()
        for make, refs in watched.items():
            assert [ref() for ref in refs] == [None] * 9, make
        assert len(jax.live_arrays()) == before


def test_initializers_over_arrays_leave_no_array_behind():
    def use():
        array = jnp.ones(3)
        init = functools.partial(lambda array, key, shape, dtype=None: jnp.ones(shape), array)
        model = bridge.to_linen(nnx.Linear, 3, 2, kernel_init=init)
        model.apply(params(model), X)

    use()
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(30):
        use()
    gc.collect()
    assert len(jax.live_arrays()) == before


class CountsCalls(nnx.Module):
    """Counts in a Python attribute; its constructor takes anything."""

    def __init__(self, config):
        self.config = config
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls * self.config.step


def test_a_changed_definition_stays_with_a_constructor_that_makes_the_same():
    def config(step):
        return types.SimpleNamespace(step=step)

    variables = {}
    for expected in (2, 4, 6):
        model = bridge.ToLinen(CountsCalls, (config(2),))
        output, updates = model.apply(variables, mutable=["nnx"])
        assert output == expected
        variables = {**variables, **updates}
    # Another configuration makes another module, which has not been called.
    other = bridge.ToLinen(CountsCalls, (config(5),))
    assert other.apply(variables, mutable=["nnx"])[0] == 5


class Tower(nnx.Module):
    """Computes numbers in its constructor, as models with a rate for each layer do."""

    def __init__(self, depth, *, rngs):
        self.rates = [float(rate) for rate in jnp.linspace(0.0, 0.5, depth)]
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for rate, layer in zip(self.rates, self.layers, strict=True):
            x = x + (1 - rate) * layer(x)
        return x


class Closing(nnx.Module):
    """Keeps a function with an array that its constructor has computed."""

    def __init__(self, size, *, rngs):
        scale = jnp.sqrt(size)
        self.act = lambda x: x / scale
        self.scale = nnx.Param(jnp.ones((1, 3)))

    def __call__(self, x):
        return self.act(x * self.scale[...])


class Drawing(nnx.Module):
    """Draws a Python number in its constructor."""

    def __init__(self, *, rngs):
        self.factor = float(rngs.params.uniform(()))
        self.scale = nnx.Param(jnp.ones((1, 3)))

    def __call__(self, x):
        return self.factor * x * self.scale[...]


@pytest.mark.parametrize(("cls", "argument"), [(Tower, 3), (Closing, 4.0)])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_a_constructor_that_computes_numbers_needs_no_stored_definition(cls, argument, run):
    """Regression: JAX's own errors on tracers."""
    model = bridge.to_linen(cls, argument)
    given = params(model)
    expected = native(cls, argument)
    np.testing.assert_allclose(run(model.apply)(given, X), expected, rtol=1e-5)


def test_a_constructor_that_draws_its_definition_says_so():
    model = bridge.to_linen(Drawing)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X), native(Drawing))
    with pytest.raises(bridge.BridgeError, match="collection `nnx`"):
        model.apply({"params": variables["params"]}, X)


def table():
    return jnp.arange(3.0)[None] * 2


class AddsTable:
    def __init__(self):
        self.table = table()

    def __call__(self, x):
        return x + self.table


class Table(nnx.Module):
    def __init__(self):
        self.values = nnx.Variable(table())


def table_in_a_cell():
    made = table()
    return lambda x: x + made


def table_in_a_default():
    def act(x, *, table=table()):  # noqa: B008 - a function that holds an array
        return x + table

    return act


def table_in_a_module():
    return functools.partial(lambda x, module: x + module.values[...], module=Table())


class Making(nnx.Module):
    """Keeps a function that its constructor has made, beside a Linen layer."""

    def __init__(self, make, *, rngs):
        self.act = make()
        self.layer = nnx.Linear(3, 3, rngs=rngs)
        self.linen = bridge.ToNNX(nn.LayerNorm(use_bias=False, use_scale=False))
        self.axis_name = "an_axis_that_is_not_bound"

    def __call__(self, x, over_axis=False):
        y = self.act(self.linen(self.layer(x)))
        return jax.lax.psum(y, self.axis_name) if over_axis else y


MAKERS_OF_TABLES = [table_in_a_cell, table_in_a_default, AddsTable, table_in_a_module]


@pytest.mark.parametrize("make", MAKERS_OF_TABLES)
def test_a_definition_that_is_made_in_a_trace_holds_no_value_of_it(make):
    """Regression: UnexpectedTracerError in every later call."""
    model = bridge.to_linen(Making, make)
    eager = model.init(KEY, X)
    compiled = jax.jit(model.init)(KEY, X)
    np.testing.assert_allclose(model.apply(compiled, X), native(Making, make), rtol=1e-5)
    assert compiled["nnx"] == eager["nnx"]
    init = functools.partial(model.init, over_axis=True)
    shapes = jax.eval_shape(lambda key: jax.lax.cond(True, init, init, key, X), KEY)
    expected = native(Making, make)
    np.testing.assert_array_equal(model.apply({**eager, "nnx": shapes["nnx"]}, X), expected)


class DrawingTable(nnx.Module):
    """Keeps a function with an array that its constructor has drawn."""

    def __init__(self, *, rngs):
        known, drawn = table(), rngs.params.uniform((1, 3))
        self.known = lambda x: x + known
        self.drawn = lambda x: x + drawn

    def __call__(self, x):
        return self.drawn(self.known(x))


def test_a_definition_that_holds_what_a_trace_has_drawn_is_refused_by_name():
    """Regression: UnexpectedTracerError in every later call."""
    model = bridge.to_linen(DrawingTable)
    np.testing.assert_array_equal(model.apply(model.init(KEY, X), X), native(DrawingTable))
    with pytest.raises(bridge.InvalidModuleError, match=r"held by 'drawn', which"):
        jax.jit(model.init)(KEY, X)


class Scaled(nnx.Module):
    """Keeps a function with an array that its constructor has computed from its argument."""

    def __init__(self, scale, *, rngs):
        scale = scale * 2
        self.act = lambda x: x * scale

    def __call__(self, x):
        return self.act(x)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_a_definition_may_hold_a_value_of_the_trace_that_a_program_is_in(transform):
    def bridged(scale):
        model = bridge.to_linen(Scaled, scale)
        return jnp.sum(model.apply(model.init(KEY, X), X))

    expected = transform(lambda scale: jnp.sum(native(Scaled, scale)))(2.0)
    np.testing.assert_allclose(transform(bridged)(2.0), expected, rtol=1e-6)


class Observing(nnx.Module):
    """Says what its argument was when it was constructed, and what it is now."""

    def __init__(self, read, argument, *, rngs):
        self.before = repr(read(argument))
        self.read, self.argument = read, argument
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self):
        return self.before, repr(self.read(self.argument))


def closure(held):
    return lambda: held


def set_cell(function, new):
    function.__closure__[0].cell_contents = new


# How to make something that holds a value, to read it, and to write another one into it.
HOLDERS = {
    "object": (Config, lambda c: c.factor, lambda c, new: setattr(c, "factor", new)),
    "nested": (
        lambda held: types.SimpleNamespace(inner=[Config(held)]),
        lambda c: c.inner[0].factor,
        lambda c, new: setattr(c.inner[0], "factor", new),
    ),
    "cell": (closure, lambda f: f(), set_cell),
    "default": (
        lambda held: lambda x=held: x,
        lambda f: f(),
        lambda f, new: setattr(f, "__defaults__", (new,)),
    ),
    "keyword": (
        lambda held: lambda *, x=held: x,
        lambda f: f(),
        lambda f, new: f.__kwdefaults__.update(x=new),
    ),
    "partial": (
        lambda held: functools.partial(closure, Config(held)),
        lambda f: f.args[0].factor,
        lambda f, new: setattr(f.args[0], "factor", new),
    ),
}
HELD = st.recursive(
    st.sampled_from([0, 1, 1.0, True, 0.0, -0.0, float("nan"), None, "a", nnx.Linear]),
    lambda held: st.lists(held, max_size=2) | st.tuples(held) | st.dictionaries(st.just("a"), held),
    max_leaves=3,
)


@drawing(25)
@given(st.sampled_from(sorted(HOLDERS)), st.lists(HELD, min_size=1, max_size=3))
def test_the_module_is_that_of_its_argument_as_it_is_at_the_call(kind, values):
    make, read, write = HOLDERS[kind]
    argument = make(values[0])
    model = bridge.to_linen(Observing, read, argument)
    stored = model.init(KEY)
    bare = {"params": stored["params"]}
    for value in values:
        write(argument, value)
        expected = Observing(read, argument, rngs=nnx.Rngs(0))()
        assert model.apply(bare) == model.apply(stored) == expected
        with rebuilds() as noted:
            assert model.apply(bare) == model.apply(stored) == expected
        assert noted == []


class Around(nnx.Module):
    """Keeps the Linen module that its constructor is given, and counts its calls."""

    def __init__(self, linen, *, counts=False, rngs):
        self.linen = linen
        self.scale = nnx.Param(jnp.full((1, 3), 2.0))
        self.counts, self.calls = counts, 0

    def __call__(self, x):
        self.calls += self.counts
        return self.linen(x * self.scale[...])


def test_a_linen_module_among_the_arguments_is_not_rebuilt_in_each_call():
    """Regression: each call binds the module anew, and the definition was made anew for it."""
    dense = nn.Dense(2)
    model = bridge.ToLinen(Around, args=(dense,))
    variables = model.init(KEY, X)
    inner = {"params": variables["params"]["args_0"]}
    model.apply(variables, X)
    with rebuilds() as noted:
        for factor in (1.0, 2.0, 3.0):
            inner = jax.tree.map(lambda x, factor=factor: factor * x, inner)
            params = variables["params"] | {"args_0": inner["params"]}
            y = model.apply(variables | {"params": params}, X)
            np.testing.assert_array_equal(y, dense.apply(inner, 2.0 * X))
    assert noted == []


def test_no_call_stores_a_definition_with_the_linen_modules_of_that_call():
    """Regression: the definition of a changed module held one with the call's variables."""
    model = bridge.ToLinen(Around, args=(nn.Dense(2),), kwargs={"counts": True})
    variables = model.init(KEY, X)
    with pytest.warns(bridge.BridgeWarning, match="calls"):
        _, updates = model.apply(variables, X, mutable=True)
    for tree in (variables, updates):
        graphdef = tree.get("nnx", {}).get("graphdef")
        held = graphdef.look.objects if isinstance(graphdef, nnx.GraphDef) else []
        assert not any(isinstance(x, nn.Module) and x.scope is not None for x in held)
